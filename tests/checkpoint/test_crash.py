"""Killed at any moment, out of disk at any byte: the last good checkpoint is there and loads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.checkpoint.deletion import await_deletions
from toolkit.checkpoint.layout import committed_steps
from toolkit.checkpoint.verify import verify_fully
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

# Each of these is one change of the file system that Python tells of before it makes it.
CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "open"}


def world(attempt: int) -> World:
    return World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=attempt)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((5000,), float(step)), "step": torch.tensor(step)}


def loaded_step(directory: Path, attempt: int) -> int | None:
    """Load, and prove that what was loaded belongs together."""
    wanted = tensors(-1)
    loaded = Checkpointer(directory, world(attempt)).load(wanted)
    if loaded is None:
        return None
    assert loaded.state == {"step": loaded.step}
    assert torch.equal(wanted["x"], tensors(loaded.step)["x"]) and wanted["step"] == loaded.step
    return loaded.step


def in_child(work) -> int:
    """Run `work` in a fork of this process and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save_and_die(directory: Path, step: int, at_change: int) -> None:
    """Save, but die by SIGKILL just before change number `at_change`."""
    seen = 0

    def before(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in CHANGES and str(directory) in str(arguments[0]):
            seen += 1
            if seen == at_change:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = Checkpointer(directory, world(1), keep_last=2)
    sys.addaudithook(before)
    checkpoints.save(step, tensors(step), {"step": step})
    assert await_deletions(30)  # which are changes, too


@pytest.mark.parametrize(
    ("saved_before", "step", "may_load"),
    [([1, 2], 3, {2, 3}), ([1, 3], 3, {3}), ([1, 5], 3, {5, 1, 3})],
    ids=["new step", "same step", "back to an earlier step"],
)
def test_a_save_killed_before_any_change_leaves_a_good_checkpoint(tmp_path, saved_before, step, may_load):
    for at_change in range(1, 100):
        directory = tmp_path / str(at_change)
        first = Checkpointer(directory, world(0))
        for earlier in saved_before:
            first.save(earlier, tensors(earlier), {"step": earlier})
        code = in_child(lambda: save_and_die(directory, step, at_change))  # noqa: B023
        assert loaded_step(directory, 2) in (may_load if code else {step})
        assert await_deletions(30)
        # What the dead attempt left is gone, and all that stands is whole.
        assert {path.suffix for path in directory.iterdir()} <= {"", ".left-1"}
        assert all(not verify_fully(path)[1] for path in committed_steps(directory).values())
        if code == 0:
            assert at_change > 10
            return
    raise AssertionError("the save never came to its end")


def save_for_ever(directory: Path) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpointer(directory, world(0), keep_last=2)
    ballast = torch.zeros(8 << 20)
    for step in range(1, 10_000):
        checkpoints.save(step, {**tensors(step), "ballast": ballast}, {"step": step})


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_kill_9_while_bytes_are_written(tmp_path, delay_s):
    child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
    child.start()
    while not (parts := list(tmp_path.glob("step-*[2-9].part-0/shard*"))):
        assert child.is_alive()
        time.sleep(0.001)
    time.sleep(delay_s)
    child.kill()
    child.join()
    at_least = int(parts[0].parent.name[5:13]) - 1
    assert loaded_step(tmp_path, 1) >= at_least


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path])
    if mounted.returncode:
        pytest.skip("this root may not mount (a container)")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk_is_a_clear_error_and_keeps_the_last(small_disk):
    checkpoints = Checkpointer(small_disk, world(0))
    checkpoints.save(1, tensors(1), {"step": 1})
    with pytest.raises(ToolkitError) as caught:
        checkpoints.save(2, {**tensors(2), "big": torch.zeros(2 << 20)}, {"step": 2})
    assert "rank 0: No space left on device" in str(caught.value)
    assert "step 1 is the last good checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
    checkpoints.save(3, tensors(3), {"step": 3})
    assert loaded_step(small_disk, 0) == 3


def test_a_disk_that_fills_at_any_page_of_a_save(small_disk):
    """Shard, digests, index or manifest: whichever file meets the end of the disk, the save fails whole."""
    failures = 0
    for free_pages in range(24):
        directory = small_disk / str(free_pages)
        checkpoints = Checkpointer(directory, world(0))
        checkpoints.save(1, tensors(1), {"step": 1})
        ballast = small_disk / "ballast"
        space = os.statvfs(small_disk)
        ballast.write_bytes(bytes((space.f_bavail - free_pages) * space.f_bsize))
        try:
            checkpoints.save(2, tensors(2), {"step": 2})
        except ToolkitError as error:
            assert "No space left on device" in str(error)
            failures += 1
        ballast.unlink()
        assert loaded_step(directory, 0) == max(committed_steps(directory))
        assert await_deletions(30)
        assert not [path for path in directory.iterdir() if "." in path.name]
    assert 3 < failures < 24
