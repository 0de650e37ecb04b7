"""Jobs for another cluster of the same accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.amend import amend_job
from toolkit.config.document import Flag
from toolkit.config.request import JobRequest, site_of_record
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site
from toolkit.site.partitions import candidates, needs_choice

SITE = """
name = "there"
[detect]
cluster_name = "near"
{scheduler}
[partitions.gpu]
default = true
max_nodes = 2
cpus_per_node = 8
qos = "long"
"""


@pytest.fixture
def there(tmp_path: Path):
    def write(scheduler: str = ""):
        path = tmp_path / "sites" / "there.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SITE.format(scheduler=scheduler))
        return load_site(str(path))

    return write


def test_the_sites_partitions_do_not_count_on_another_cluster(resolve, there) -> None:
    away = resolve('cluster = "far"\nnodes = 9\npartition = "any"', site=there())
    assert (away.job.partition, away.job.qos, away.partition_limits) == ("any", "", None)
    assert resolve('cluster = "far"', site=there()).job.partition == ""
    home = resolve('cluster = "near"', site=there())
    assert (home.job.partition, home.job.qos) == ("gpu", "long")
    again = amend_job(home, site=site_of_record(home), flags={"job.time": Flag("5", "-t")})
    assert (again.job.cluster, again.job.partition) == ("near", "gpu")


def test_no_partition_is_chosen_on_another_cluster(resolve, there) -> None:
    assert not needs_choice(resolve('cluster = "far"'), there())
    with pytest.raises(
        ToolkitError, match=r"job\.partition: site there does not describe cluster far.*`sinfo -M far -s`"
    ):
        needs_choice(resolve('cluster = "far"\npartition = "auto"'), there())
    with pytest.raises(
        ToolkitError, match="site there does not describe cluster far, so toolkit cannot choose a partition"
    ):
        candidates(JobRequest(str(resolve('cluster = "far"').job_file)), there())


def test_a_site_names_its_cluster_and_a_job_another(resolve, there) -> None:
    site = there('[scheduler]\ncluster = "mid"')
    job = resolve(site=site)
    assert (job.job.cluster, job.origin("job.cluster").layer, job.job.partition) == ("mid", "site", "gpu")
    away = resolve('cluster = "near"', site=site)
    assert (away.job.cluster, away.job.partition) == ("near", "")


def test_sbatchs_variables_name_it_and_the_flag_wins(resolve, there) -> None:
    both = {"SBATCH_CLUSTERS": "first", "SLURM_CLUSTERS": "far"}
    assert resolve('cluster = "own"', environ=both, site=there()).job.cluster == "far"
    assert resolve(environ={"SBATCH_CLUSTERS": "first"}, site=there()).job.cluster == "first"
    flags = {"job.cluster": Flag("other", "-M")}
    assert resolve(environ=both, flags=flags, site=there()).job.cluster == "other"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('cluster = "a,b"', "'a,b' names more than one cluster, but a run can use only one"),
        ('cluster = "all"', "'all' names more than one cluster"),
        ('cluster = "a b"', "'a b' is not a valid cluster name"),
        ('sbatch = ["-M far"]', r"'-M far' would override .* Fix: write cluster = \.\.\. in \[job\]"),
        ('sbatch = ["--clusters=far"]', "would override"),
    ],
)
def test_what_is_refused(resolve, lines: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        resolve(lines)


def test_a_machine_without_a_scheduler_has_no_clusters(resolve) -> None:
    environ = {"SLURM_CLUSTERS": "far"}  # some sites set it for every shell, and mean their Slurm's commands
    assert resolve(environ=environ, site=load_site("local")).job.cluster == ""
    with pytest.raises(ToolkitError, match=r"job\.cluster: site 'local' has no scheduler for a cluster 'far'"):
        resolve('cluster = "far"', site=load_site("local"))


@pytest.mark.parametrize(
    ("option", "message"), [("--clusters=far", r"set cluster in \[scheduler\]"), ("hetjob", "heterogeneous")]
)
def test_a_sites_options_name_no_cluster(there, option: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        there(f'[scheduler]\noptions = ["{option}"]')
