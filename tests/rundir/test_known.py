"""Runs are listed when their folders have changed, and looked into for their jobs once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir import index, known
from toolkit.rundir.claims import claim_attempt, claim_start
from toolkit.rundir.files import write_json
from toolkit.rundir.find import find_run
from toolkit.rundir.index import RunIndex
from toolkit.rundir.layout import create_run
from toolkit.runs.status.reconcile_submission import close_submission

ENDED = {
    **json.loads((Path(__file__).parents[2] / "docs" / "samples" / "attempt_exit.json").read_text()),
    "final": True,
}


def make_run(runs, job_id, *, over=True):
    run = create_run(runs, "train_lm")
    write_json(run.record, {"job": {"job": {"array": ""}}})
    write_json(run.submitted(0), {"job_id": job_id, "start": 0})
    if over:
        claim_start(run, first=0, job_id=job_id, host="n1", pid=1, process_started=1)
        write_json(claim_attempt(run).exit_file, ENDED)
    return run


@pytest.fixture
def listings(monkeypatch, note_calls):
    """The folders that are listed; each change is old enough at once to be trusted."""
    monkeypatch.setattr(index, "SETTLED_NS", -1_000_000_000)
    monkeypatch.setattr(known, "FEW", 0)
    return note_calls(index.os, "listdir", lambda path: path.name)


@pytest.fixture
def looks(note_calls):
    """The runs whose files are looked into for their jobs."""
    return note_calls(known, "job_ids", lambda run: run.run_id)


def names(runs):
    opened = RunIndex(runs)
    found = [entry.name.run_id for page in opened.newest() for entry in page]
    opened.close()
    return found


def test_a_folder_is_listed_again_only_when_it_has_changed(tmp_path, listings):
    first = make_run(tmp_path, "1")
    assert names(tmp_path) == names(tmp_path) == [first.run_id]
    assert listings.count("train_lm") == 1
    second = make_run(tmp_path, "2")
    assert names(tmp_path) == [second.run_id, first.run_id]
    assert listings.count("train_lm") == 2
    shutil.rmtree(first.path)
    assert names(tmp_path) == [second.run_id]
    shutil.rmtree(tmp_path / "train_lm")
    assert names(tmp_path) == []


def test_a_folder_that_has_just_changed_is_not_trusted(tmp_path, monkeypatch):
    """Another run may come within the same tick of the file system's clock."""
    make_run(tmp_path, "1")
    changed_ns = (tmp_path / "train_lm").stat().st_ctime_ns
    monkeypatch.setattr(index, "_folders", lambda runs: [("train_lm", changed_ns)])
    assert len(names(tmp_path)) == 1
    make_run(tmp_path, "2")
    assert len(names(tmp_path)) == 2


def test_runs_that_are_over_are_looked_into_once(tmp_path, listings, looks):
    runs = [make_run(tmp_path, str(number)) for number in range(5)]
    living = make_run(tmp_path, "9", over=False)
    assert find_run("0", tmp_path) == runs[0].path
    assert len(looks) == 6
    looks.clear()
    assert find_run("0.batch", tmp_path) == runs[0].path
    assert looks == [living.run_id, runs[0].run_id]
    with pytest.raises(NotFoundError, match="no run of job 77 found"):
        find_run("77", tmp_path)


def test_a_run_that_lives_again_is_found_by_its_new_job(tmp_path, listings, looks):
    run = make_run(tmp_path, "1")
    assert find_run("1", tmp_path) == run.path
    close_submission(run, 1, "8")
    assert find_run("8", tmp_path) == find_run("1", tmp_path) == run.path


def test_of_two_runs_with_one_job_id_the_one_that_has_not_ended_is_found(tmp_path, listings):
    """As a cluster gives them that began its numbers anew; of two that have ended, or may both live, neither is meant."""
    older = make_run(tmp_path, "1")
    assert find_run("1", tmp_path) == older.path
    ended = make_run(tmp_path, "1")
    with pytest.raises(ToolkitError, match=rf"job 1 belongs to 2 runs\. Fix: .*{ended.run_id}.*, {older.run_id}"):
        find_run("1", tmp_path)
    newer = make_run(tmp_path, "1", over=False)
    assert find_run("1", tmp_path) == newer.path
    make_run(tmp_path, "1", over=False)
    with pytest.raises(ToolkitError, match="job 1 belongs to 4 runs"):
        find_run("1", tmp_path)


def test_the_newest_is_found_without_a_look_at_all(tmp_path, listings, looks):
    for number in range(30):
        make_run(tmp_path, str(number))
    last = make_run(tmp_path, "30")
    assert find_run("last", tmp_path) == find_run(last.run_id, tmp_path) == last.path
    assert not looks


def test_folders_of_others_with_names_that_no_text_has_are_passed_over(tmp_path):
    run = make_run(tmp_path, "7")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")  # noqa: PTH102
    os.mkdir(os.fsencode(run.path.parent) + b"/\xfe")  # noqa: PTH102
    assert find_run("7", tmp_path) == find_run(run.run_id, tmp_path) == run.path
    with pytest.raises(NotFoundError):
        find_run("\udcff", tmp_path)
