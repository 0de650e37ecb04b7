"""Report the steps of a script that does not use toolkit's training loop. Standard library only."""

import atexit
import operator
import os
from functools import cache
from pathlib import Path
from typing import SupportsIndex

from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say_beside
from toolkit.world.record import recorder_of_rank
from toolkit.world.stop import StopWatch

__all__ = ["step", "watch_of_rank"]


def step(number: SupportsIndex) -> None:
    """Report that the run has finished `number` steps.

    Each rank records the time of the step (docs/python.md); rank 0 writes the number to the heartbeat within about a second.
    Outside of a run, it does nothing.

    Raises:
        ToolkitError: `number` is not a step number.
    """
    step_number = number if type(number) is int and number >= 0 else _checked(number)
    recorder = recorder_of_rank()
    if recorder is not None:
        recorder.step(step_number)
    watch = watch_of_rank()
    if watch is not None and watch.attempt is not None:
        try:
            watch.beat(step_number)
        except OSError as error:  # a full disk must not end the script
            _say_once(f"toolkit.step: cannot record the step: {error.strerror}")


def _checked(number: SupportsIndex) -> int:
    try:
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if found < 0:
        raise ToolkitError(
            f"expected a step number, got {number!r}", where="toolkit.step", fix="pass an integer of at least 0"
        )
    return found


@cache
def watch_of_rank() -> StopWatch | None:
    """Return the stop watch of this process; None if it is not a rank of a run. That of rank 0 writes the heartbeat."""
    folder, attempt = os.environ.get("TOOLKIT_RUN_DIR"), os.environ.get("TOOLKIT_ATTEMPT", "")
    if not folder or not attempt:
        return None
    run, rank = RunDirectory(Path(folder)), os.environ.get("TOOLKIT_RANK")
    watch = StopWatch(run, run.attempt(int(attempt)) if rank == "0" else None, saves=False)
    atexit.register(watch.tell_last_step)
    return watch


# A child process has no thread of the watch of its parent.
os.register_at_fork(after_in_child=watch_of_rank.cache_clear)


@cache
def _say_once(message: str) -> None:
    say_beside(message)
