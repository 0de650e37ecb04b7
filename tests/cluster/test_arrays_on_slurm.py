"""Slurm is the judge of which tasks an array has."""

from __future__ import annotations

import pytest
from on_slurm import Site, wait_for

from toolkit.slurm.array import parse_array
from toolkit.slurm.commands import Slurm
from toolkit.slurm.refusals import refusal_of

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("text", ["0-9%2", "0-15:4", "1,3,5-7", "07", "0-4:2,1-3:2%3"])
def test_slurm_makes_the_tasks_that_we_read(cluster, text):
    """Slurm writes what is pending as a list of its own, which must name the same tasks. The job is held."""
    job = cluster.run("sbatch", "-H", "--parsable", "-o", "/dev/null", "-a", text, "--wrap", "true").strip()
    shown = cluster.run("squeue", "-h", "-r", "-o", "%K", "-j", job).split()
    limit = cluster.run("scontrol", "-o", "show", "job", job).partition("ArrayTaskThrottle=")[2]
    cluster.run("scancel", job)
    ours = parse_array(text)
    assert sorted(map(int, shown)) == sorted(ours)
    assert (int(limit.split()[0]) if limit else None) == ours.at_once


def test_a_number_too_large_for_the_cluster_is_refused_with_the_fix(cluster):
    with pytest.raises(AssertionError) as refused:
        cluster.run("sbatch", "-H", "-o", "/dev/null", "-a", "0-2000000", "--wrap", "true")
    assert "MaxArraySize" in refusal_of(str(refused.value))[1]


def test_tasks_beyond_the_largest_array_run_as_one_run(here: Site) -> None:
    """Its numbers go on over two arrays."""
    _, run = here.submit(here.job("echo number $SLURM_ARRAY_TASK_ID"), "-a", "10000-10002%2")
    assert here.wait(run).returncode == 0
    assert [task["task"] for task in here.status(run)["tasks"]] == [10000, 10001, 10002]
    assert here.ok("logs", f"{run.run_id}_10001", "--rank", "0") == "number 10001\n"
    assert {path.stat().st_mode & 0o777 for path in run.path.glob("slurm-*.out")} == {0o600}


@pytest.mark.evidence
def test_a_requeue_runs_no_completed_task_again(here: Site) -> None:
    """Task 0 has completed, task 1 runs, task 2 waits for its turn."""
    gate = here.folder / "gate"
    line = f"test $SLURM_ARRAY_TASK_ID = 0 || until test -e {gate}; do sleep 0.2; done"
    job_id, run = here.submit(here.job(line), "-a", "0-2%1")
    wait_for(lambda: run.task(1).attempt_numbers())
    assert f"job {job_id} returns to the queue" in here.ok("requeue", run.run_id)
    gate.touch()
    assert here.toolkit("wait", run.run_id, timeout_s=120).returncode == 0
    assert [len(run.task(number).start_numbers()) for number in range(3)] == [1, 2, 1]


def test_what_ends_before_the_requeue_is_not_run_again(here: Site) -> None:
    """Nor what ends between our look at it and the call."""
    job_id, run = here.submit(here.job("true"))
    assert here.wait(run).returncode == 0
    Slurm(str(here.cluster.slurm_conf)).requeue(job_id)
    assert here.toolkit("requeue", run.run_id).returncode == 1
    assert (here.status(run)["state"], run.start_numbers()) == ("completed", [0])
    assert "COMPLETED" in here.cluster.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", job_id)
