"""Slurm is the judge of which tasks an array has."""

from __future__ import annotations

import pytest
from on_slurm import Site, wait_for

from toolkit.slurm.array import array_variables, parse_array
from toolkit.slurm.commands import Slurm
from toolkit.slurm.refusals import refusal_of

pytestmark = pytest.mark.cluster

SEEN = "echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT $SLURM_ARRAY_TASK_MIN $SLURM_ARRAY_TASK_MAX $SLURM_ARRAY_TASK_STEP"


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
    """Its numbers continue over two arrays, and the steps of a script see them all."""
    script = here.folder / "beyond.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --array=9999-10003:2%2\n#SBATCH -t 5\n{SEEN}\nsrun sh -c '{SEEN}'\n")
    _, run = here.submit(script)
    assert here.wait(run).returncode == 0
    assert [task["task"] for task in here.status(run)["tasks"]] == [9999, 10001, 10003]
    for task in (9999, 10001, 10003):
        assert here.ok("logs", f"{run.run_id}_{task}", "--rank", "0") == f"{task} of 3 9999 10003 2\n" * 2
    assert {path.stat().st_mode & 0o777 for path in run.path.glob("slurm-*.out")} == {0o600}


def test_every_start_sees_the_array_of_the_first_one(here: Site) -> None:
    """After a failure, when a user repeats a completed task or adds one, and in the rerun of a task."""
    gate = here.folder / "gate"
    job = here.job(f"{SEEN}; test $SLURM_ARRAY_TASK_ID = 1 || test -e {gate}", "[restart]\ncrashes = 0\n")
    _, run = here.submit(job, "-a", "1-7:3")
    assert here.wait(run).returncode == 1
    gate.touch()
    here.ok("resume", run.run_id, "--wait")
    done = here.toolkit("resume", run.run_id, "--set", "job.array=1,9", "--wait")
    assert (
        "tasks 9 are new: SLURM_ARRAY_TASK_COUNT, _MIN, _MAX and _STEP stay those of the first start (1-7:3)"
        in done.stderr
    )
    assert [len(run.task(task).attempt_numbers()) for task in (1, 4, 7, 9)] == [2, 2, 2, 1]
    for task in (1, 4, 7, 9):
        assert here.ok("logs", f"{run.run_id}_{task}", "--rank", "0") == f"{task} of 3 1 7 3\n"
    again = here.run(here.ok("rerun", f"{run.run_id}_4", "--wait", "--parsable").strip().partition(";")[2])
    assert here.ok("logs", f"{again.run_id}_4", "--rank", "0") == "4 of 3 1 7 3\n"


@pytest.mark.parametrize("text", ["0,5-9:2", "7,3,1"])
def test_slurm_describes_an_array_as_toolkit_does(cluster, shared_path, text):
    cluster.run("sbatch", "--wait", "-o", f"{shared_path}/%a", "-a", text, "--wrap", SEEN)
    seen = " ".join(array_variables(text).values())
    assert {path.read_text() for path in shared_path.iterdir()} == {f"{task} of {seen}\n" for task in parse_array(text)}


def test_a_requeue_from_outside_repeats_no_completed_task(here: Site) -> None:
    """`scontrol requeue ARRAYJOB` starts all tasks again, as does $SLURM_JOB_ID of the array's last task."""
    gate = here.folder / "gate"
    job = here.job(f"test $SLURM_ARRAY_TASK_ID = 0 || until test -e {gate}; do sleep 0.2; done")
    job_id, run = here.submit(job, "-a", "0-1")
    wait_for(lambda: run.task(1).attempt_numbers() and here.status(run)["tasks"][0]["state"] == "completed")
    here.cluster.run("scontrol", "requeue", job_id)
    wait_for(
        lambda: "has ended (completed), so there is nothing to do" in (run.path / f"slurm-{job_id}_0.out").read_text()
    )
    gate.touch()
    assert here.wait(run).returncode == 0
    assert [len(run.task(number).start_numbers()) for number in range(2)] == [1, 2]
    here.ok("resume", run.run_id, "--set", "job.array=0", "--wait")
    assert len(run.task(0).start_numbers()) == 2


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
