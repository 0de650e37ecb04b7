"""A site file from the live cluster, proved there: what works passes, and what is broken on purpose is found."""

import json
import re
from pathlib import Path

import pytest
from on_slurm import mpi_of

from toolkit.site.load import load_site, site_files

pytestmark = pytest.mark.cluster

GOLDEN = Path(__file__).parents[1] / "golden"


def findings(here, file, *words):
    # Four minutes: beside other tests, the two nodes of one machine can need more than the default of one.
    result = here.toolkit("site", "check", file, "--partition", "main", "-t", "4", "--json", *words, timeout_s=400)
    assert result.stdout, result
    (found,) = json.loads(result.stdout)["partitions"].values()
    return result, {one["check"]: (one["state"], one["detail"]) for one in found}


def test_a_file_from_the_live_cluster_is_proved(here):
    file = here.folder / "made.toml"
    here.ok("site", "init", "-o", file)
    # The nodes' network, not that of the machine that the test is on.
    text = re.sub(r'^interface = "\w+"', 'interface = "eth0"', file.read_text(), flags=re.MULTILINE)
    mpi, library = mpi_of(here.cluster.layout)
    if mpi == "pmi2":  # the MPI on PATH, which is Debian's, is another
        text = re.sub(r"^libmpi = .*", f'libmpi = "{library}"', text, flags=re.MULTILINE)
    file.write_text(re.sub(r"^scratch = .*\n", "", text, flags=re.MULTILINE))
    site = load_site(str(file), {})
    assert set(site.partitions) == {"main", "debug", "short", "low", "high"} and site.default_partition == "main"
    assert site.partitions["main"].gpus_per_node == 4 and site.launcher.mpi == mpi
    result, found = findings(here, file)
    assert result.returncode == 0, found
    states = {check: state for check, (state, _) in found.items()}
    assert states == dict.fromkeys(
        ("limits", "ranks", "mpi", "libmpi", "gpus", "network", "shared_path", "clocks"), "passed"
    )
    assert "MB/s between two ranks on two nodes" in found["network"][1]
    listed = here.ok("site", "list", "--json", TOOLKIT_SITES=str(here.folder))
    (checked,) = (row["checked"] for row in json.loads(listed) if row["name"] == "made")
    assert re.fullmatch(r"checked \d{4}-\d\d-\d\d, Slurm \d\S* \(1 of 5 partitions\)", checked)
    assert not list(here.folder.glob("runs/.site-probe-*"))


def test_what_is_broken_on_purpose_is_found(here):
    file = here.folder / "broken.toml"
    file.write_text(
        f'name = "broken"\nextends = "{here.file}"\n[launcher]\nmpi = "none"\n[network]\ninterface = "ib0"\n'
        "[partitions.main]\nmax_nodes = 99\ngpus_per_node = 2\n"
    )
    result, found = findings(here, file)
    assert result.returncode == 1
    assert found["limits"] == ("failed", "max_nodes = 99, but Slurm has 4")
    assert found["ranks"][0] == "failed"


def test_sbatch_reads_the_directives_of_every_shipped_site(here):
    """Only the words: the partition, the account and the size are other clusters'."""
    here_instead = (
        "--partition=main",
        "--nodes=1",
        "--time=1",
        "--mem=0",
        "--qos=",
        "--constraint=",
        "--gres=none",
        "--gpus-per-node=0",
    )
    for name in site_files({}):
        path = GOLDEN / f"train_lm-{name}.sbatch"
        said = here.command(["sbatch", "--test-only", *here_instead, str(path)])
        assert not re.search(r"unrecognized|Invalid --|Unable to parse", said.stderr), (name, said.stderr)
