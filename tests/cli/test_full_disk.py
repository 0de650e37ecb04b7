"""Runs on a full file system: where there is no room, what to do, and nothing of a run left behind."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


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
    assert "Fix: make room there, or give another folder with --runs or TOOLKIT_RUNS" in said.err
    assert disk.names() <= {"runs"}


def test_a_resume_on_a_full_disk_leaves_the_run_as_it_was(toolkit, disk: SmallDisk) -> None:
    runs = disk.folder / "runs"
    ran = toolkit("run", toolkit.job("exit 3"), "--site", "local", "--runs", runs)
    assert ran.code == 3
    before = disk.names()
    disk.fill()
    said = toolkit("resume", "last", "--here", "--runs", runs)
    assert said.code == 2
    assert f"{runs}/work/" in said.err and "Fix: make room there" in said.err
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
    """Its ranks are done, which empty markers say; the run's end waits for room, and says so on the terminal before."""
    runs, job = disk.folder / "runs", toolkit.job(f"cat /dev/zero > {disk.filling}; echo lost; exit 0")

    def make_room() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not list(runs.glob("*/*/attempts/000/ranks/rank-00000.done")):
            time.sleep(0.1)
        marked.extend(path.stat().st_size for path in runs.glob("*/*/attempts/000/ranks/rank-00000.done"))
        time.sleep(1.5)  # the supervisor has found out by then
        disk.filling.unlink()

    marked: list[int] = []
    other = threading.Thread(target=make_room)
    other.start()
    said = toolkit("run", job, "--site", "local", "--runs", runs)
    other.join()
    assert said.code == 0, said.err
    assert marked == [0]
    assert said.err.count("the run's file system is full") == 1 and "Fix: make room there" in said.err
    (log,) = runs.glob("*/*/slurm-local-*.out")
    assert len(re.findall(r"cannot be written \(.*exit.json'\); it is tried again for 30 s", log.read_text())) <= 1
    assert list(runs.glob("*/*/attempts/000/exit.json"))
