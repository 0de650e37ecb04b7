"""Runs that cannot be asked: a file of theirs is damaged, or their cluster is gone. Small programs stand for Slurm's commands."""

from __future__ import annotations

import json
import os
import time

import pytest
from queued_runs import claim, end_attempt, submitted

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


@pytest.fixture
def slurm(fake_slurm):
    """A Slurm with an empty queue, which accepts every scancel."""
    fake_slurm.queue()
    fake_slurm.respond("scancel")
    fake_slurm.respond("sacct", code=1)
    return fake_slurm


@pytest.mark.parametrize("damaged", ["attempts/000/start.json", "record.json", "submitted-000.json"])
def test_the_job_of_a_damaged_run_is_named_and_can_be_cancelled(toolkit, slurm, damaged) -> None:
    run = submitted(toolkit, "44", "torn")
    claim(run, job_id="44")
    (run.attempts / "000").mkdir()
    (run.path / damaged).write_text("x{")
    slurm.comments(("44", "44", "RUNNING", f"toolkit:{run.run_id}:0"))
    for command in ("status", "explain", "timeline", "watch"):
        said = toolkit(command, "44")
        assert said.code == 2 and f"{damaged}: invalid JSON" in said.err, command
        assert f"job 44 may still be active, and `toolkit cancel {run.run_id}` or `scancel 44` ends it" in said.err, (
            command
        )
    (told,) = json.loads(toolkit.ok("history", "--json"))
    assert (told["state"], told["job_id"]) == ("unknown", "44")
    assert told["site"] == ("" if damaged == "record.json" else "devcluster")
    assert told["reason"] == f"{damaged} is damaged: `toolkit status {run.run_id}` explains how to continue"
    assert f"({damaged} is damaged, so `scancel 44` was executed immediately)" in toolkit.ok("cancel", "44")
    assert slurm.calls("scancel") == ["scancel --full 44"] and run.is_asked("cancel")


def test_a_pending_run_is_cancelled_not_stopped(toolkit, slurm) -> None:
    run = submitted(toolkit, "44", "waits")
    slurm.queue(("44", "PENDING", "Priority"))
    said = toolkit("stop", run.run_id)
    assert (said.code, f"Fix: `toolkit cancel {run.run_id}` ends it" in said.err) == (1, True), said
    toolkit.ok(*said.err.partition("`toolkit ")[2].partition("`")[0].split())


def test_a_damaged_note_hides_no_other_note(toolkit, slurm) -> None:
    runs = [submitted(toolkit, job, f"noted{job}") for job in ("44", "45")]
    for run, text in zip(runs, ("x{", json.dumps({"rank": 0, "host": "n1", "pid": 1, "note": "no GPU"})), strict=True):
        claim(run)
        end_attempt(run, state="completed")
        run.attempt(0).rank_file(0).parent.mkdir()
        run.attempt(0).rank_file(0).write_text(text)
    assert f"{runs[1].run_id}  no GPU" in toolkit.ok("status", *(run.run_id for run in runs))


def test_a_run_whose_cluster_is_gone_goes_on_elsewhere_when_its_user_says_so(toolkit, slurm) -> None:
    run = submitted(toolkit, "7", "moved")
    claim(run)
    slurm.respond("squeue", stderr="Unable to contact slurm controller (connect failure)\n", code=1)
    refused = toolkit("resume", run.run_id, "--site", "local")
    assert refused.code == 1 and f"`toolkit resume {run.run_id} --site OTHER --job-gone`" in refused.err
    elsewhere = ("resume", run.run_id, "--site", "local", "--job-gone")
    alive = toolkit(*elsewhere)
    assert alive.code == 1 and f"run {run.run_id} is still active: it wrote starts/000/claim.json" in alive.err
    hour_ago = time.time() - 3600
    os.utime(run.start(0) / "claim.json", (hour_ago, hour_ago))
    toolkit.ok(*elsewhere, "--wait")
    assert json.loads(toolkit.ok("status", run.run_id, "--json"))["state"] == "completed"
