"""Report the steps of a script that does not use toolkit's training loop. Standard library only."""

import os
from functools import cache
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.world.stop import StopWatch

__all__ = ["step"]


def step(number: int) -> None:
    """Report that the run has finished `number` steps; rank 0 records it at most once a second.

    Outside of a run, and on other ranks, it does nothing.

    Raises:
        ToolkitError: `number` is not a step number.
    """
    if not isinstance(number, int) or number < 0:
        raise ToolkitError(
            f"expected a step number, got {number!r}", where="toolkit.step", fix="pass an integer of at least 0"
        )
    watch = _watch_of_attempt()
    if watch is not None:
        watch.beat(number)


@cache
def _watch_of_attempt() -> StopWatch | None:
    """Return the watch that writes the heartbeat of this attempt; None if this process is not rank 0 of a run."""
    folder, attempt = os.environ.get("TOOLKIT_RUN_DIR"), os.environ.get("TOOLKIT_ATTEMPT", "")
    if not folder or not attempt or os.environ.get("TOOLKIT_RANK") != "0":
        return None
    run = RunDirectory(Path(folder))
    return StopWatch(run, run.attempt(int(attempt)), saves=False)
