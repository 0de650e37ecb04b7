"""Sweeps, chains and jobs in turn, with Slurm as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from on_slurm import Site, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

# Ends its supervisor the first time, as a lost node would; the second time it is done.
DIES_ONCE = """cd $TOOLKIT_RUN_DIR; test -d attempts/001 && exit
sed -n "s/.*\\"pid\\": //p" starts/000/claim.json | tr -d , | xargs kill -9; sleep 60"""


def files_of(run: RunDirectory) -> list[Path]:
    return [path for path in run.path.rglob("*") if path.is_file()]


def test_each_task_runs_with_its_own_values_and_leaves_four_files(here: Site) -> None:
    """A task of which one fails keeps more, and is named by its values."""
    job = here.job("echo of $SEED and $SLURM_ARRAY_TASK_ID; test $SEED != 3", "[restart]\ncrashes = 0\n")
    _, run = here.submit(job, "--sweep", "env.vars.SEED=2,3,4")
    assert len([path for path in run.path.iterdir() if path.is_file()]) <= 20
    assert here.wait(run).returncode == 1
    told = here.status(run)
    assert [(task["state"], task["values"]["env.vars.SEED"]) for task in told["tasks"]] == [
        ("completed", "2"), ("failed", "3"), ("completed", "4")
    ]  # fmt: skip
    for task in (0, 2):
        wait_for(lambda task=task: len(files_of(run.task(task))) == 3)  # it tidies up after it has told its end
        assert here.ok("logs", f"{run.run_id}_{task}", "--rank", "0") == f"of {task + 2} and {task}\n"
        assert f"[0] of {task + 2} and {task}\n" in here.ok("logs", f"{run.run_id}_{task}")


def test_a_chain_waits_for_a_requeued_parent_and_dies_with_it(here: Site) -> None:
    gate = here.folder / "gate"
    parent_id, parent = here.submit(
        here.job(f"until test -e {gate}; do sleep 0.2; done; false", "[restart]\ncrashes = 0\n")
    )
    child_id, child = here.submit(here.job("true"), "--after", parent_id)
    wait_for(lambda: parent.attempt_numbers())
    here.ok("requeue", parent.run_id)
    wait_for(lambda: parent.attempt_numbers() == [0, 1])
    assert here.status(child)["state"] == "pending"
    gate.touch()
    assert here.wait(parent).returncode == 1
    wait_for(lambda: here.status(child)["state"] == "cancelled")
    assert json.loads(here.ok("explain", child.run_id, "--json"))["symptom"] == "parent_failed"
    assert child_id in here.ok("history", "--tree").splitlines()[1]


@pytest.mark.evidence
def test_the_next_job_in_turn_goes_on_and_the_last_ones_are_not_run(here: Site) -> None:
    job_id, run = here.submit(here.job(DIES_ONCE), "--repeat", "4")
    assert here.wait(run).returncode == 0
    assert run.start_numbers() == [0, 1]
    assert (run.start(0) / "lost.json").exists()
    wait_for(lambda: not here.cluster.run("squeue", "-h", "-j", job_id).strip())
    assert here.status(run)["state"] == "completed"
