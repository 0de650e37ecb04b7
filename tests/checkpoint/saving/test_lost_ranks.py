"""Ranks that cannot begin a save in the background, and ranks that end in the middle of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from real_ranks import one_rank, run_ranks

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.saving.prepared import PreparedSave
from toolkit.errors import OwnFailureError
from toolkit.supervise.error_lines import CONSEQUENCE
from toolkit.world.facts import World


def own(world: World) -> dict[str, dict[str, torch.Tensor]]:
    return {"own": {f"rank-{world.rank}": torch.full((1000,), float(world.rank))}}


def save_without_a_thread(folder: Path, world: World) -> dict:
    """Rank 1 gets no thread for its second save."""
    start = threading.Thread.start
    checkpoints = Checkpointer(folder / "checkpoints", world)
    checkpoints.save_in_background(1, own(world), {})
    checkpoints.wait()
    ended: list[object] = []

    def refuse(thread: threading.Thread) -> None:
        if world.rank == 1 and thread.name == "checkpoint save":
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    with pytest.raises(OwnFailureError) as failed:
        checkpoints.save_in_background(2, own(world), {}, on_end=ended.append)
    threading.Thread.start = start
    for thread in threading.enumerate():
        if thread.name == "checkpoint save":
            thread.join(10)
    assert not ended and not checkpoints.save_failed
    checkpoints.save_in_background(3, own(world), {}, on_end=ended.append)
    checkpoints.wait()
    assert ended == [None]
    return {"said": str(failed.value), "steps": sorted(path.name for path in (folder / "checkpoints").glob("step-*"))}


def test_a_rank_without_a_thread_keeps_no_other_waiting(tmp_path):
    first, second = run_ranks(2, save_without_a_thread, tmp_path)
    assert first["said"] == second["said"]
    assert (
        "checkpoint of step 2 was not saved: rank 1: cannot start a thread for the save: can't start new thread; "
        "step 1 is the last good checkpoint. Fix: raise the thread limit of the host"
    ) in first["said"]
    assert second["steps"] == ["step-00000001", "step-00000003"]


def last_rank_dies(folder: Path, world: World, *, in_background: bool) -> dict:
    """The last rank is killed in its second save; what the others hear."""
    checkpoints = Checkpointer(folder / "checkpoints", world)
    checkpoints.save(1, own(world), {})
    write = PreparedSave._write_own

    def write_and_die(self, *given):
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *given)

    PreparedSave._write_own = write_and_die
    try:
        if in_background:
            checkpoints.save_in_background(2, own(world), {})
            checkpoints.wait()
        else:
            checkpoints.save(2, own(world), {})
    except OwnFailureError as error:
        chain = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        return {"said": str(error), "first": [type(chain[-1]).__name__, str(chain[-1])]}
    return {}


def in_background(folder: Path, world: World) -> dict:
    return last_rank_dies(folder, world, in_background=True)


def in_foreground(folder: Path, world: World) -> dict:
    return last_rank_dies(folder, world, in_background=False)


@pytest.mark.parametrize(("work", "size"), [(in_background, 2), (in_background, 3), (in_foreground, 2)])
def test_ranks_hear_that_another_one_was_killed_while_it_saved(tmp_path, work, size):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=one_rank, args=(rank, size, work, tmp_path, tmp_path)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert ranks[-1].exitcode == -signal.SIGKILL
    for rank in range(size - 1):
        heard = json.loads((tmp_path / str(rank)).read_text())
        kind, first = heard["first"]
        assert kind == "RuntimeError" and "onnection" in first
        place = re.escape(str(tmp_path / "checkpoints"))
        assert re.match(
            rf"{place}: lost the connection to a rank \([^().]*[Cc]onnection (closed|reset) by peer\S*( \S+)?\) "
            r"while step 2 was saved; step 1 is the last good checkpoint\. Fix: run `toolkit explain RUN` for",
            heard["said"].replace("127.0.0.1", "here"),
        ), heard["said"]
        # Who was killed is to blame, and not who tells of it.
        assert CONSEQUENCE.search(heard["said"])
