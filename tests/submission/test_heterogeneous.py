"""A heterogeneous job before it is submitted: its script, what it may cost, and each component against the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.job import request_of
from toolkit.site.load import load_site
from toolkit.submission.allocation import check_here
from toolkit.submission.preflight.cost import cost_of, in_words, together
from toolkit.submission.script import directives

JOB = """
[job]
entry = ["true"]
time = "60"
requeue = false
sbatch = ["--exclusive"]
[[component]]
cpus_per_rank = 8
mem_gb_per_node = 200
[[component]]
nodes = 2
ranks_per_node = 4
gpus_per_node = 4
sbatch = ["--hint=nomultithread"]
"""


@pytest.fixture
def job(tmp_path: Path) -> ResolvedJob:
    (tmp_path / "work.toml").write_text(JOB)
    (tmp_path / "here.toml").write_text('name = "here"\n')
    return resolve_job(tmp_path / "work.toml", site=load_site(str(tmp_path / "here.toml"), {}), environ={})


def test_the_script_has_the_first_component_and_all_that_is_the_jobs_before_the_others(job: ResolvedJob) -> None:
    run = RunDirectory(Path("/runs/work/1"))
    lines = directives(job, run, 0, ["bad1"], ["--dependency=afterok:7"])
    first, second = lines[: lines.index("hetjob")], lines[lines.index("hetjob") + 1 :]
    assert {"--job-name=work", "--nodes=1", "--cpus-per-task=8", "--mem=200G", "--exclusive", "--exclude=bad1"} <= set(
        first
    )
    assert first[-1] == "--dependency=afterok:7"
    assert second == [
        "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=1", "--no-requeue", "--gpus-per-node=4", "--time=60",
        "--exclude=bad1", "--hint=nomultithread",
    ]  # fmt: skip


def test_the_components_cost_together(job: ResolvedJob) -> None:
    cost = together([cost_of(one, request_of(one)) for one in job.components])
    assert in_words(cost) == "requests at most 3 node-hours, 8 GPU-hours (3 nodes x 0-01:00:00)"
    assert (cost.cpus, cost.billing_hours) == (16, None)


def test_they_are_not_for_here_and_now(job: ResolvedJob) -> None:
    with pytest.raises(
        ToolkitError, match=r"work\.toml:7:component: a foreground run has one component, but the job has 2"
    ):
        check_here(job, {"SLURM_JOB_ID": "7"})
