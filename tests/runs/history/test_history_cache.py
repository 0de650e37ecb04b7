"""The history of many runs: what is remembered of those that ended, and when it is looked at again."""

from __future__ import annotations

import json
import sqlite3

import pytest
from queued_runs import claim, end_attempt, submitted

from toolkit.rundir.claims import claim_attempt
from toolkit.runs.history import listing
from toolkit.runs.status import state as module
from toolkit.runs.status.reconcile_submission import close_submission


@pytest.fixture
def ended(toolkit):
    """A run that failed, as its supervisor leaves it behind."""
    run = submitted(toolkit, "7", "bad")
    claim(run)
    end_attempt(run, state="failed", exit_code=4)
    return run


@pytest.fixture
def reads(note_calls):
    """The runs whose files are read, each time."""
    return note_calls(module, "read_run", lambda run: run.run_id)


pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


def told(toolkit, *options):
    return [(one["run_id"], one["state"]) for one in json.loads(toolkit.ok("history", "--json", *options))]


def test_what_has_ended_is_read_once(toolkit, squeue, ended, reads):
    living = submitted(toolkit, "8", "lives")
    calls = squeue(("8", "RUNNING", "None"))
    first = toolkit.ok("history", "--json")
    assert reads.count(ended.run_id) == 1
    assert toolkit.ok("history", "--json") == first
    assert reads.count(ended.run_id) == 1 and reads.count(living.run_id) > 2
    assert len(calls()) == 2
    assert told(toolkit, "--state", "failed") == [(ended.run_id, "failed")]
    assert told(toolkit, "--state", "failed", "--state", "running", "-n", "1") == [(living.run_id, "running")]
    assert told(toolkit, "--since", "2100-01-01") == [] and len(told(toolkit, "--since", "1d")) == 2
    assert toolkit.ok("status", "--live", "--json").count("run_id") == 1
    assert reads.count(ended.run_id) == 1


def test_what_takes_long_is_counted_and_nothing_is_said_of_none(toolkit, squeue, ended, monkeypatch):
    monkeypatch.setattr(listing, "SLOW_S", 0.0)
    said = toolkit("history").err
    assert "1 run was read in " in said and "left to check" not in said


def test_a_run_that_is_resumed_lives_in_every_question(toolkit, squeue, ended):
    squeue(("9", "RUNNING", "None"))
    assert told(toolkit, "--state", "failed") == [(ended.run_id, "failed")]
    close_submission(ended, 1, "9")
    assert told(toolkit) == told(toolkit, "--state", "running") == [(ended.run_id, "running")]
    assert told(toolkit, "--state", "failed") == []


def test_an_attempt_behind_the_end_is_seen(toolkit, squeue, ended):
    """As `scontrol requeue` brings one about, without a word to the toolkit."""
    squeue(("7", "RUNNING", "None"))
    assert told(toolkit, "--state", "running") == []
    claim_attempt(ended)
    assert told(toolkit, "--state", "running") == [(ended.run_id, "running")]


def test_an_array_is_remembered_with_its_tasks(toolkit, squeue, reads):
    from toolkit.rundir.layout import make_task

    run = submitted(toolkit, "9", "many", array="0-1")
    squeue(("9_1", "PENDING", "Resources"))
    for number, state in ((0, "completed"), (1, "failed")):
        before = len(reads)
        toolkit.ok("history")
        assert len(reads) > before, "a task has not ended"
        task = make_task(run, number)
        claim(task, job_id=f"9_{number}")
        end_attempt(task, state=state, exit_code=number)
    first = toolkit.ok("history", "--json")
    before = len(reads)
    assert toolkit.ok("history", "--json") == first and len(reads) == before
    assert [task["state"] for task in json.loads(first)[0]["tasks"]] == ["completed", "failed"]


def test_runs_may_move(toolkit, squeue, ended):
    squeue()
    toolkit.ok("history")
    toolkit.runs.rename(toolkit.folder / "moved")
    (one,) = json.loads(toolkit.ok("history", "--json", "--runs", toolkit.folder / "moved"))
    assert (one["state"], one["path"]) == ("failed", str(toolkit.folder / "moved" / "bad" / ended.run_id))


@pytest.mark.parametrize("damage", [b"no database", b"SQLite format 3\0" + b"\xff" * 5000, "halved"])
def test_a_damaged_cache_is_built_anew(toolkit, squeue, ended, reads, damage):
    squeue()
    before = toolkit.ok("history")
    cache = toolkit.runs / ".cache" / "history.sqlite"
    cache.write_bytes(cache.read_bytes()[:6000] if damage == "halved" else damage)
    said = toolkit("history")
    assert (said.code, said.out) == (0, before)
    assert "is damaged" in said.err and str(cache) in said.err and "rebuilding it" in said.err
    assert len(reads) == 2
    assert toolkit("history").err == "" and len(reads) == 2


def test_a_cache_of_another_version_is_built_anew(toolkit, squeue, ended, reads):
    squeue()
    toolkit.ok("history")
    with sqlite3.connect(toolkit.runs / ".cache" / "history.sqlite") as cache:
        cache.execute("PRAGMA user_version = 1")
    cache.close()
    assert told(toolkit) == [(ended.run_id, "failed")] and len(reads) == 2


def test_a_locked_cache_is_gone_past(toolkit, squeue, ended, monkeypatch):
    squeue()
    before = toolkit.ok("history")
    monkeypatch.setattr("toolkit.rundir.index.LOCKED_S", 0.1)
    other = sqlite3.connect(toolkit.runs / ".cache" / "history.sqlite")
    other.execute("BEGIN EXCLUSIVE")
    said = toolkit("history")
    other.close()
    assert (said.code, said.out) == (0, before)
    assert "continuing without the run index" in said.err and "locked" in said.err and said.err.count("\n") == 1


def test_runs_that_cannot_be_written_have_their_cache_at_home(toolkit, squeue, ended, monkeypatch, reads):
    squeue()
    monkeypatch.setenv("HOME", str(toolkit.folder / "home"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert told(toolkit) == told(toolkit) == [(ended.run_id, "failed")] and len(reads) == 1
    assert list((toolkit.folder / "home" / ".cache" / "toolkit").glob("history-*.sqlite"))
    assert not (toolkit.runs / ".cache").exists()


@pytest.mark.parametrize(("option", "value"), [("--since", "yesterday"), ("--state", "done"), ("--since", "999999w")])
def test_a_filter_that_is_none_is_refused(toolkit, option, value):
    said = toolkit("history", option, value)
    assert (said.code, said.err.count("\n"), value in said.err) == (2, 1, True)
