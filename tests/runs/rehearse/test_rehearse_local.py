"""`rehearse` of runs on this machine: what a failure cost, and that a run which did not survive it is not told to have."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from toolkit.errors import CheckFailedError
from toolkit.rundir.claims import claim_start, end_start
from toolkit.rundir.files import read_json_or_none, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.rehearse.fault_injection import choose

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())

# Steps like a training job, without torch. Its argument says which attempt ends at which step with which code.
STEPS = """
import json, sys, time
from toolkit.world.discover import discover

world = discover()
ends = json.loads(sys.argv[1])
for step in range(900):
    world.stop_watch.look(step, rank=world.rank)
    last, code = ends.get(str(world.attempt), (900, 0))
    if step == last:
        if code == "hang":
            time.sleep(600)
        sys.exit(code)
    time.sleep(0.05)
"""
BUDGET_OF_ONE = "crashes = 1"


def documented_keys() -> set[str]:
    """The first column of the page's table."""
    section = (DOCS / "rehearse.md").read_text().split("## JSON\n")[1]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


@pytest.fixture
def stepping(toolkit, wait_until):
    """Start a run that has done more than `steps` steps when it is handed over."""
    started = []

    def start(restart=BUDGET_OF_ONE, *, steps=5, **ends) -> RunDirectory:
        script, path = toolkit.folder / "steps.py", toolkit.folder / "steps.toml"
        script.write_text(STEPS)
        told = json.dumps({name.removeprefix("attempt"): end for name, end in ends.items()})
        entry = json.dumps([sys.executable, str(script), told])
        path.write_text(f"[job]\nentry = {entry}\nranks_per_node = 2\n[restart]\n{restart}\n")
        run = toolkit.submit(path)
        started.append(run)
        wait_until(lambda: (read_json_or_none(run.attempt(0).heartbeat) or {"step": 0})["step"] > steps)
        return run

    yield start
    for run in started:
        toolkit("cancel", run.run_id)
        toolkit("wait", run.run_id)


def test_a_killed_rank_is_rehearsed_once_and_not_when_it_would_end_the_run(toolkit, stepping) -> None:
    run = stepping()
    asked = toolkit("rehearse", run.run_id, "kill-rank", 1)
    assert (asked.code, "pass --yes" in asked.err) == (2, True), asked
    unknown = toolkit("rehearse", run.run_id, "kill-rank", 9, "--yes")
    assert (unknown.code, "no rank 9" in unknown.err, "kill-rank 1" in unknown.err) == (2, True, True)
    assert not run.attempt(0).exit_file.exists()
    cost = json.loads(toolkit.ok("rehearse", run.run_id, "kill-rank", 1, "--yes", "--json"))
    assert set(cost) == documented_keys()
    assert (cost["cause"], cost["attempt"], cost["next_attempt"]) == ("crashed", 0, 1)
    assert cost["resumed_at"] == 0 and cost["steps_repeated"] == cost["steps"] > 5  # it keeps no checkpoints
    parts = [cost[part] for part in ("detect_s", "queue_s", "start_s", "first_step_s", "repeat_s")]
    assert cost["lost_s"] == pytest.approx(sum(parts), abs=1.0)
    end = json.loads(run.attempt(0).exit_file.read_text())
    assert (end["rank"], end["reason"].split(" (")[0]) == (1, "killed by SIGKILL")
    again = toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes")
    assert (again.code, "would end this run" in again.err) == (1, True)
    for failure in ("preempt", "walltime", "kill-node"):
        refused = toolkit("rehearse", run.run_id, failure, "--yes")
        assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert not run.attempt(1).exit_file.exists()


def test_explain_knows_that_a_failure_was_rehearsed(toolkit, stepping) -> None:
    run = stepping()
    said = toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes")
    assert (said.code, ": crashed; restarting\n" in said.err) == (0, True), said
    left = json.loads(run.attempt(0).rehearsed.read_text())
    jsonschema.validate(left, {**SCHEMA, "$ref": "#/$defs/rehearsed"})
    told = json.loads(toolkit.ok("explain", run.run_id, "--json"))
    (quoted,) = [one["line"] for one in told["evidence"] if one["source"] == "attempts/000/rehearsed.json"]
    assert quoted == f"kill-rank was rehearsed at {left['time']}: sent KILL to rank 1 on {socket.gethostname()}"


@pytest.mark.evidence
def test_a_run_that_ends_in_its_next_attempt_has_not_survived(toolkit, stepping) -> None:
    run = stepping(steps=40, attempt1=[20, 5])
    said = toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes")
    assert (said.code, "survived" in said.out) == (1, False), said
    assert "the run ended (failed) before step" in said.err and f"`toolkit explain {run.run_id}`" in said.err


@pytest.mark.evidence
def test_a_run_whose_next_attempt_fails_too_is_followed_to_the_one_that_goes_on(toolkit, stepping) -> None:
    run = stepping("crashes = 2", steps=40, attempt1=[20, 5])
    begun = time.monotonic()
    cost = json.loads(toolkit.ok("rehearse", run.run_id, "kill-rank", 1, "--yes", "--json"))
    assert (cost["attempt"], cost["next_attempt"]) == (0, 2)
    assert cost["lost_s"] == pytest.approx(time.monotonic() - begun, abs=3.0)


def test_a_run_that_is_completed_without_a_new_step_has_survived(toolkit, stepping) -> None:
    run = stepping(steps=40, attempt1=[20, 0])
    said = toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes")
    assert (said.code, "the run ended (completed) before step" in said.err) == (0, True), said
    assert "survived" in said.out and "no new step" in said.out


def test_a_run_that_has_not_gone_on_in_time_is_told_so(toolkit, stepping) -> None:
    run = stepping(steps=40, attempt1=[20, "hang"])
    said = toolkit("rehearse", run.run_id, "kill-rank", 1, "--yes", "--json", "--timeout", 20)
    cost = json.loads(said.out)
    assert (said.code, cost["next_attempt"], cost["repeat_s"], cost["lost_s"]) == (0, 1, None, None)
    assert "gave up before step" in said.err


def test_a_run_that_has_ended_is_not_rehearsed(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    said = toolkit("rehearse", run.run_id, "kill-rank", 0, "--yes")
    assert (said.code, "has completed; only a running run" in said.err) == (1, True)


def live_again(toolkit, job_id: str, *, pid: int = 1) -> RunDirectory:
    """A run with crashes = 1 whose attempt 0 crashed in job 7, and whose attempt 1 lives in another start, as `job_id`."""
    toolkit.ok("render", toolkit.job("true", more=f"[restart]\n{BUDGET_OF_ONE}\n"))
    (path,) = toolkit.runs.glob("work/*")
    run = RunDirectory(path)
    for start, job in enumerate(("7", job_id)):
        claim_start(run, first=start, job_id=job, host="node1", pid=1, process_started=1)
        end_start(run, start, state="follow_up", exit_code=1)
        attempt = run.attempt(start)
        attempt.path.mkdir()
        attempt.make_folders()
        sample = json.loads((DOCS / "samples" / "attempt_start.json").read_text())
        write_json(attempt.start_file, {**sample, "start": start, "job_id": job})
    end = json.loads((DOCS / "samples" / "attempt_exit.json").read_text())
    write_json(run.attempt(0).exit_file, {**end, "cause": "crashed", "next": "restart", "final": False})
    rank = json.loads((DOCS / "samples" / "rank_start.json").read_text())
    write_json(run.attempt(1).rank_file(0), {**rank, "rank": 0, "host": socket.gethostname(), "pid": pid})
    return run


def test_a_budget_is_counted_over_follow_up_jobs_and_anew_after_a_resume(toolkit) -> None:
    run = live_again(toolkit, "8")
    with pytest.raises(CheckFailedError, match=r"restart\.crashes = 1 is spent"):
        choose(run, run.attempt(1), "kill-rank", 0, None)
    record = json.loads(run.record.read_text())
    write_json(run.resumed(1), {"time": "2026-11-21T02:48:01.000Z", "job": record["job"]})
    choose(run, run.attempt(1), "kill-rank", 0, None)


def test_a_rank_that_is_gone_is_told_as_such(toolkit) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    run = live_again(toolkit, "local-8", pid=gone.pid)
    run.attempt(0).exit_file.unlink()
    inject = choose(run, run.attempt(1), "kill-rank", 0, None)
    with pytest.raises(CheckFailedError, match=f"process {gone.pid} is no longer a rank"), inject():
        pass


def test_only_kill_rank_takes_a_rank(toolkit) -> None:
    toolkit.submit(toolkit.job("true"))
    said = toolkit("rehearse", "last", "preempt", 3, "--yes")
    assert (said.code, "preempt does not accept a rank" in said.err) == (2, True), said
    toolkit.ok("wait", "last")
