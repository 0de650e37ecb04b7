"""An honest status on a real Slurm: arrays, the requeue hold, a supervisor that is gone, hostile names, accounting."""

from __future__ import annotations

import os

import pytest
from on_slurm import Site, wait_for

from toolkit.rundir.claims import read_claim
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import read_sacct, sacct_argv

pytestmark = pytest.mark.cluster

ONCE = "[restart]\ncrashes = 0\n"
HOSTILE = "a|b\x1fc\nJobState=COMPLETED"


@pytest.mark.evidence
def test_the_tasks_of_an_array(here: Site) -> None:
    last = "[ $SLURM_ARRAY_TASK_ID != 3 ] || sleep 300"  # until it is cancelled
    job = here.job(f"echo I am $SLURM_ARRAY_TASK_ID; {last}; sleep 2; test $SLURM_ARRAY_TASK_ID != 1", ONCE)
    _, run = here.submit(job, "-a", "0-3%2")
    told = here.status(run)
    assert len(told["tasks"]) == 4 and told["reason"].startswith("array 0-3%2: ")
    here.ok("cancel", run.run_id, "--task", 3)
    done = here.wait(run)
    told = here.status(run)
    assert told["reason"] == "array 0-3%2: 1 failed, 1 cancelled, 2 completed"
    assert [task["state"] for task in told["tasks"]] == ["completed", "failed", "completed", "cancelled"]
    assert (told["state"], told["exit_code"], done.returncode) == ("failed", 1, 1)
    assert "exit code 1" in here.ok("logs", run.run_id, "--task", 1)
    assert here.ok("logs", f"{told['job_id']}_2", "--rank", "all").strip() == "[0] I am 2"
    assert here.toolkit("cancel", run.run_id, "--task", 1).returncode == 1
    assert here.toolkit("cancel", run.run_id, "--task", 9).returncode == 4


def test_a_requeue_is_explained_and_a_lost_supervisor_named(here: Site) -> None:
    job_id, run = here.submit(here.job("sleep 100"))
    wait_for(lambda: run.attempt_numbers())
    assert here.status(run)["state"] == "running"
    here.command(["scontrol", "requeue", job_id])
    wait_for(lambda: here.status(run)["state"] == "pending")
    reasons = [""]  # the delay lasts 11 s
    wait_for(lambda: reasons.append(here.status(run)["reason"]) or "BeginTime" in reasons[-1])
    assert "requeued once, and Slurm delays a requeued job until 20" in reasons[-1]

    wait_for(lambda: len(run.start_numbers()) == 2)
    claim = read_claim(run, 1)
    assert claim is not None
    wait_for(lambda: here.status(run)["state"] == "running")
    assert here.cluster.exec(claim.host, ["kill", "-9", str(claim.pid)]).returncode == 0
    wait_for(lambda: here.status(run)["state"] != "running")
    told = here.status(run)
    assert (told["state"], told["exit_code"]) == ("failed", None)
    assert told["reason"].startswith("Slurm: FAILED") and "supervisor lost" in told["reason"]


def test_names_and_comments_of_any_kind_with_accounting_off_and_on(cluster, accounting_cluster) -> None:
    for one in (cluster, accounting_cluster):
        slurm = Slurm(str(one.slurm_conf))
        shape = ["-n1", "-t1", "-o", "/dev/null", "-D", "/", "-J", HOSTILE, "--comment", HOSTILE]
        failing = one.run("sbatch", "--parsable", *shape, "--wrap", "exit 3").strip()
        many = one.run("sbatch", "--parsable", *shape, "--array=0-3%1", "--wrap", "sleep 30").strip()
        wanted = [failing, f"{many}_0", f"{many}_3", "999999"]

        def states(slurm: Slurm = slurm, wanted: list[str] = wanted) -> list[str]:
            return [fact.state for fact in slurm.jobs(wanted).values()]

        wait_for(lambda states=states: states() == ["FAILED", "RUNNING", "PENDING"])
        assert slurm.jobs([failing])[failing].comment == HOSTILE
        slurm.cancel([many])
        wait_for(lambda states=states: states()[1:] == ["CANCELLED", "CANCELLED"])

    wait_for(lambda: len(accounted(slurm, failing, many)) == 3)
    told = accounted(slurm, failing, many)
    assert (told[failing].state, told[failing].exit_code) == ("FAILED", "3:0")
    assert {fact.cancelled_by for job, fact in told.items() if job != failing} == {os.getuid()}


def accounted(slurm: Slurm, *jobs: str) -> dict[str, object]:
    """What sacct says of the jobs that have ended."""
    rows = read_sacct(slurm.call(sacct_argv(jobs, "~mark~")), "~mark~")
    return {fact.job_id: fact for fact in rows if fact.state.split()[0] in ("FAILED", "CANCELLED")}
