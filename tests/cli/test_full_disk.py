"""Runs on a full file system: where there is no room, what to do, and nothing of a run left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.rundir.files import why_unwritable


class SmallDisk:
    """A file system of one MiB that can be filled to its last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filling = folder / "filling"

    def fill(self) -> None:
        with self.filling.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
            while True:
                stream.write(bytes(4096))

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")} - {"filling"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_new_run_on_a_full_disk_says_where_and_leaves_nothing(toolkit, disk: SmallDisk, command: str) -> None:
    disk.fill()
    said = toolkit(command, toolkit.job("true"), "--site", "local", "--runs", disk.folder / "runs")
    assert said.code == 2
    # `submit` looks first, `run` finds out.
    assert re.search(f"{disk.folder}(: only 0.0 GB are free|/runs/work/.*: No space left on device)", said.err), (
        said.err
    )
    assert "Fix: free space there, or choose another folder with --runs or TOOLKIT_RUNS" in said.err
    assert disk.names() <= {"runs"}


def test_a_resume_on_a_full_disk_leaves_the_run_as_it_was(toolkit, disk: SmallDisk) -> None:
    runs = disk.folder / "runs"
    ran = toolkit("run", toolkit.job("exit 3"), "--site", "local", "--runs", runs)
    assert ran.code == 3
    before = disk.names()
    disk.fill()
    said = toolkit("resume", "last", "--here", "--runs", runs)
    assert said.code == 2
    assert f"{runs}/work/" in said.err and "Fix: free space there" in said.err
    assert disk.names() == before


@pytest.mark.parametrize("room", range(4096, 9 * 4096, 4096))
def test_however_little_room_there_is_no_half_of_a_run_stays(toolkit, disk: SmallDisk, room: int) -> None:
    """The disk is full at the secret, the script, the job file, or the record."""
    disk.fill()
    os.truncate(disk.filling, disk.filling.stat().st_size - room)
    said = toolkit("render", toolkit.job("true"), "--site", "local", "--runs", disk.folder / "runs")
    if said.code == 0:
        assert list(disk.folder.glob("runs/work/*/record.json"))
    else:
        assert said.code == 2 and "--runs" in said.err
        assert disk.names() <= {"runs"}


def test_a_disk_that_a_run_fills_is_said_and_the_run_ends_when_there_is_room(toolkit, disk: SmallDisk) -> None:
    """Its ranks are done, which empty markers say; the run's end has room of its own, and nobody need make any."""
    runs, job = disk.folder / "runs", toolkit.job(f"cat /dev/zero > {disk.filling}; echo lost; exit 0")
    said = toolkit("run", job, "--site", "local", "--runs", runs)
    assert said.code == 0, said.err
    (attempt,) = runs.glob("*/*/attempts/000")
    assert (attempt / "ranks" / "rank-00000.done").stat().st_size == 0
    assert json.loads((attempt / "exit.json").read_text())["cause"] == "completed"
    assert not (attempt / "reserve").exists() and list(runs.glob("*/*/starts/000/end.json"))
    assert (
        said.err.count("(No space left on device): output of ranks is lost") == 1
        and "Fix: free space there" in said.err
    )


def test_a_rank_that_fails_on_a_full_disk_is_told_with_the_cause(toolkit, disk: SmallDisk) -> None:
    """Its restart finds no room to keep for its own end, which the room that the first one kept is enough to say."""
    runs = disk.folder / "runs"
    said = toolkit("run", toolkit.job(f"cat /dev/zero > {disk.filling}; exit 5"), "--site", "local", "--runs", runs)
    assert said.code == 125
    ends = [json.loads(path.read_text()) for path in sorted(runs.glob("*/*/attempts/*/exit.json"))]
    assert [(end["cause"], end["symptom"]) for end in ends] == [
        ("crashed", "disk_full"),
        ("launch_failed", "disk_full"),
    ]
    status = json.loads(toolkit("status", "last", "--json", "--runs", runs).out)
    assert status["state"] == "failed", status
    assert status["reason"].endswith("record the end of an attempt: No space left on device"), status


def kill(pid: int) -> None:
    """Kill a process and return once it has exited: until then, `toolkit status` finds it in the process table."""
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    exited, _, _ = select.select([process], [], [], 20)
    os.close(process)
    assert exited, f"process {pid} is still there 20 s after SIGKILL"


def test_a_run_that_is_lost_on_a_full_disk_says_so(toolkit, disk: SmallDisk) -> None:
    runs = disk.folder / "runs"
    assert toolkit("submit", toolkit.job("sleep 60"), "--site", "local", "--runs", runs).code == 0
    claim = runs.glob("*/*/starts/000/claim.json")
    deadline = time.monotonic() + 20
    while (path := next(claim, None)) is None or not list(runs.glob("*/*/attempts/000/ranks/rank-00000.json")):
        claim = runs.glob("*/*/starts/000/claim.json")
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kill(json.loads(path.read_text())["pid"])
    disk.fill()
    status = json.loads(toolkit("status", "last", "--json", "--runs", runs).out)
    assert status["state"] == "lost"
    assert re.search(r"left no result; the run's file system is full \(.*0 bytes", status["reason"]), status


def test_a_quota_is_found_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system itself has room, as statvfs would say."""
    assert why_unwritable(tmp_path, 1 << 14) == ""

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    assert why_unwritable(tmp_path, 1 << 14) == "Disk quota exceeded"
    assert not list(tmp_path.iterdir())
