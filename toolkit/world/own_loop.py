"""Stop and save requests in a loop that is neither toolkit's nor that of `main(world, config)`: of a script or a framework.

Standard library only; torch is used if the program has loaded it.
"""

import atexit
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.errors import OwnFailureError
from toolkit.metrics.windows import MEASURED
from toolkit.rundir.files import write_text
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say_beside
from toolkit.world.record import record, recorder_of_rank
from toolkit.world.step import step, watch_of_rank
from toolkit.world.stop import StopWatch, largest

__all__ = ["agree", "begin", "record_metrics", "should_save", "should_stop"]


def should_stop(number: int) -> bool:
    """Report that the run has finished `number` steps, and return True if all ranks must save now and leave the program.

    Call it on every rank after every step: all ranks get the same answer, by an all-reduce in the default group if there is
    one. From the first call on, SIGTERM is a stop request. Outside of a run, return False.

    Raises:
        ToolkitError: `number` is not a step number.
    """
    _answering_watch()  # the heartbeat of `step` says whether the loop accepts requests
    step(number)
    return agree(number)


def should_save() -> bool:
    """Return True if all ranks must save and continue (`toolkit save`), as they agreed in the last `should_stop`."""
    watch = watch_of_rank()
    return watch is not None and watch.save_agreed


def begin(number: int) -> None:
    """Start to measure steps and to accept stop requests, before the first step of a loop that continues from step `number`.

    Call it again after a framework has set its own handler of SIGTERM.

    Raises:
        OwnFailureError: another rank continues from a later step.
    """
    watch = _answering_watch()
    if watch is None:
        return
    watch.install()
    recorder = recorder_of_rank()
    if recorder is not None:
        recorder.step(number)
    furthest = _largest(number)
    if furthest != number:
        raise OwnFailureError(
            f"this rank continues from step {number}, another one from step {furthest}",
            where=f"rank {os.environ.get('TOOLKIT_RANK')}",
            fix="let all ranks load the same checkpoint, from a folder that all nodes share",
        )


def agree(number: int) -> bool:
    """Return what `should_stop` returns, without the end of a step: `toolkit.step` reports that."""
    watch = _answering_watch()
    if watch is None:
        return False
    asked = watch.look(number, rank=0 if watch.attempt is not None else 1)
    is_first = not watch.stop_agreed
    stops = watch.agree(_largest(asked))
    if stops and is_first:
        # It runs only if the program ends well: an error must not count as a stop.
        atexit.register(_mark_stopped, os.getpid())
    return stops


def record_metrics(metrics: Mapping[str, Any]) -> None:
    """Record those metrics of a framework that are single numbers, as `toolkit.record` does, under names that it accepts."""
    for key, value in metrics.items():
        name = re.sub(r"[^A-Za-z0-9_./-]|^(?=[^A-Za-z_])", "_", str(key))[:63]
        if hasattr(value, "item"):
            value = value.item() if _count(value) == 1 else None
        is_number = isinstance(value, int | float) and name not in MEASURED
        if is_number and (math.isfinite(value) or not name.endswith("_s")):
            record(name, value)


def _count(array: Any) -> int:
    """Return the number of elements of a tensor of torch or an array of numpy."""
    return int(array.numel() if hasattr(array, "numel") else array.size)


@cache
def _answering_watch() -> StopWatch | None:
    """Return the watch of this rank, which from now on accepts requests; None outside of a run."""
    watch = watch_of_rank()
    if watch is not None:
        watch.saves = True
        watch.install()
        # Otherwise `Process.terminate` would not end a process that the program forks.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return watch


os.register_at_fork(after_in_child=_answering_watch.cache_clear)


def _largest(number: int) -> int:
    """Return the largest `number` of all ranks, or this one's if torch.distributed does not connect them."""
    dist = sys.modules.get("torch.distributed")
    return largest(number) if dist is not None and dist.is_available() else number


def _mark_stopped(pid: int) -> None:
    """Record that this rank saved and left, which its guard knows only if the request was a signal to this rank."""
    if os.getpid() != pid:  # a forked child
        return
    attempt = RunDirectory(Path(os.environ["TOOLKIT_RUN_DIR"])).attempt(int(os.environ["TOOLKIT_ATTEMPT"]))
    try:
        write_text(attempt.done_marker(int(os.environ["TOOLKIT_RANK"])), "stopped\n")
    except OSError as error:
        say_beside(f"cannot write that this rank stopped: {error.strerror}")
