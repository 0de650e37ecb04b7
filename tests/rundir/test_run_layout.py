"""A new run: its name, its folders, who may read them."""

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import create_run, make_task, new_run_id

MOMENTS = st.datetimes(min_value=datetime(2020, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))


@given(first=MOMENTS, second=MOMENTS)
def test_ids_sort_by_time(first, second):
    first, second = sorted([first, second])
    assert new_run_id(first) <= new_run_id(second)


def test_ids_of_one_second_sort_by_time_too():
    moments = [datetime(2026, 11, 20, 14, 22, 33, microsecond, UTC) for microsecond in (0, 20, 500_000, 999_999)]
    ids = [new_run_id(moment) for moment in moments]
    assert ids == sorted(set(ids))
    assert ids[0] == "20261120-142233-0000"


def test_two_runs_of_one_instant_are_different_runs(tmp_path, monkeypatch):
    clock = iter(["20261120-142233-0000", "20261120-142233-0000", "20261120-142233-0001"])
    monkeypatch.setattr("toolkit.rundir.layout.new_run_id", lambda: next(clock))
    assert create_run(tmp_path, "job").run_id != create_run(tmp_path, "job").run_id


@pytest.mark.parametrize(("access", "folder_mode"), [("user", 0o700), ("group", 0o750)])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_access_says_who_reads_a_run(tmp_path, access, folder_mode, umask):
    before = os.umask(umask)
    try:
        run = create_run(tmp_path, "job", access=access)
        claim_attempt(run)
    finally:
        os.umask(before)
    for folder in (run.path, *(path for path in run.path.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == folder_mode, folder
    assert stat.S_IMODE(run.secret.stat().st_mode) == 0o600  # the group never gets the secret


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match="cannot create a run directory") as error:
        create_run(tmp_path / "file", "job")
    assert "--runs" in error.value.fix


def test_what_was_asked_of_an_array_counts_for_tasks_that_were_not_resumed_since(run_directory):
    first, second = make_task(run_directory, 1), make_task(run_directory, 2)
    (run_directory.control / "cancel").touch()
    assert first.is_asked("cancel") and second.is_asked("cancel") and not first.is_asked("stop")
    run_directory.resumed(1).touch()
    second.start(1).mkdir()
    assert (first.is_asked("cancel"), second.is_asked("cancel")) == (True, False)
    first.submitted(1).touch()  # resumed, too, and still in the queue
    assert not first.is_asked("cancel")
    (second.control / "cancel").touch()
    assert second.is_asked("cancel")


def test_only_whole_checkpoints_count(run_directory):
    assert run_directory.committed_checkpoints() == []
    whole = ["step-00000003", "step-20000000", "step-100000000"]
    for name in (*whole, "step-00000030.part-1", "step-00000009.stale-0", "step-best"):
        (run_directory.checkpoints / name).mkdir()
    assert [path.name for path in run_directory.committed_checkpoints()] == whole


def test_the_folders_of_a_run_are_on_the_disk(tmp_path, monkeypatch):
    """Else a power cut may take the name of the one that holds all checkpoints."""
    synced: list[Path] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    run = create_run(tmp_path, "job")
    assert {tmp_path, tmp_path / "job", run.path} <= set(synced)
    synced.clear()
    attempt = claim_attempt(run)
    assert {run.attempts, attempt.path} <= set(synced)
