"""Runs that this user may not read: a folder of runs may be a whole group's, and one of them hides no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from sampling import sampled

CALL = "import sys; from toolkit.cli.main import main; sys.argv[0] = 'toolkit'; main()"


@pytest.fixture
def runs(toolkit):
    """A run that can be read, and a newer one that is closed: (its id, its folder)."""
    for name in ("open", "closed"):
        toolkit.ok("submit", toolkit.job("true", name=name), "--wait")
    (seen,), (closed,) = (toolkit.runs.glob(f"{name}/*") for name in ("open", "closed"))
    closed.chmod(0)
    yield seen.name, closed
    closed.chmod(0o700)


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    """A command as somebody types it whom the modes of files keep out, as root is not."""
    argv = [sys.executable, "-c", CALL, *map(str, words)]
    if os.geteuid() == 0:
        argv = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *argv]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)


def test_a_run_that_cannot_be_read_hides_no_other(toolkit, runs) -> None:
    seen, closed = runs
    fix = f"Permission denied. Fix: `chmod u+rwX {closed}`"
    said = typed("status", closed.name, seen)
    assert said.returncode == 2 and seen in said.stdout and fix in said.stderr, said
    assert typed("status", "last").stdout.splitlines()[1].split()[1] == seen
    said = typed("status", "4711")
    assert (
        said.returncode == 4 and "cannot determine whether this run has job 4711" in said.stderr and fix in said.stderr
    )
    closed.chmod(0o700)
    toolkit.ok("history")  # it is remembered, too
    closed.chmod(0)
    listed = json.loads(typed("history", "--json").stdout)
    assert {one["run_id"]: one["state"] for one in listed} == {seen: "completed", closed.name: "unknown"}
    for words in (("status", "--live"), ("gc", "--dry-run"), ("watch",)):
        said = typed(*words)
        assert said.returncode == 0 and "Permission" not in said.stderr, (words, said)


@pytest.mark.parametrize("lacks_index", sampled([False, True], lambda case: case[0]))
def test_a_job_folder_that_cannot_be_read_hides_no_other(toolkit, runs, lacks_index) -> None:
    seen, closed = runs
    folder = closed.parent
    if lacks_index:
        shutil.rmtree(toolkit.runs / ".cache", ignore_errors=True)
        (toolkit.runs / ".cache").touch()  # no folder for the index can be made
    folder.chmod(0)
    try:
        for command in ("history", "explain"):
            listed = typed(command)
            assert listed.returncode == 0 and seen in listed.stdout, listed
            assert f"skipping the runs in {folder}: it cannot be read" in listed.stderr
    finally:
        folder.chmod(0o700)
    assert closed.name in typed("history").stdout


@pytest.mark.parametrize("command", sampled(["logs", "cancel", "explain", "resume"], lambda case: case[0] == "resume"))
def test_who_can_mend_it_is_said(toolkit, runs, command) -> None:
    _, closed = runs
    said = typed(command, closed.name)
    assert said.returncode == 2 and f"Permission denied. Fix: `chmod u+rwX {closed}`" in said.stderr, said


def test_a_damaged_run_hides_no_job_of_another(toolkit, runs) -> None:
    seen, closed = runs
    closed.chmod(0o700)
    for path in closed.glob("submitted-*.json"):
        path.write_text("{")
    (own,) = (toolkit.runs / "open" / seen).glob("submitted-*.json")
    job_id = json.loads(own.read_text())["job_id"]
    assert seen in toolkit.ok("status", job_id)


def test_another_users_run_is_theirs_to_open(toolkit, runs) -> None:
    _, closed = runs
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to somebody else")
    os.chown(closed, 1, 1)
    said = typed("status", closed.name)
    assert "record.json: Permission denied. Fix: ask its owner daemon for access" in said.stderr
