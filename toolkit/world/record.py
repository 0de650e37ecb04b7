"""The recorder of this rank, and the metrics that a program adds to its steps. Standard library only."""

import atexit
import math
import os
import re
from functools import cache
from pathlib import Path
from typing import SupportsFloat

from toolkit.errors import ToolkitError
from toolkit.metrics.recorder import Recorder
from toolkit.metrics.ring import Ring
from toolkit.metrics.windows import MEASURED, METRIC_NAME, MOST_USER_METRICS, declared_metrics
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say_beside
from toolkit.world.script_waits import ScriptWaits

__all__ = ["record", "recorder_of_rank"]


def record(name: str, value: SupportsFloat) -> None:
    """Record a number for the current step of this rank; `toolkit.step(n)` ends a step. Outside of a run, do nothing.

    Raises:
        ToolkitError: not a name or number, or a tensor on a GPU, which would have to wait for the GPU.
    """
    recorder = recorder_of_rank()
    column = None if recorder is None else recorder.columns.get(name)
    number = value if type(value) is float else _number(name, value)
    if not math.isfinite(number) and name.endswith("_s"):
        raise _refused(f"expected a finite number of seconds, got {number}", name, "pass the duration in seconds")
    if column is None:
        _check_name(name)
        column = None if recorder is None else recorder.column(name)
    if recorder is not None and column is not None:
        recorder.noted[column] = number
    elif recorder is not None:
        _say_once(f"toolkit.record: {name!r} is not recorded, as there are {MOST_USER_METRICS} other names")


def _number(name: str, value: SupportsFloat) -> float:
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu":
        raise _refused(f"expected a number, got a tensor on {device}", name, "pass value.item() in some of the steps")
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise _refused(f"expected a number, got {value!r:.100}", name, "pass an integer or a float")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(METRIC_NAME, name):
        raise _refused("not a valid name of a metric", name, "use up to 63 characters: A-Z a-z 0-9 _ . / -")
    if name in MEASURED:
        raise _refused("toolkit measures this itself", name, "use another name")


def _refused(message: str, name: object, fix: str) -> ToolkitError:
    return ToolkitError(message, where=f"toolkit.record, metric {name!r:.100}", fix=fix)


@cache
def recorder_of_rank() -> Recorder | None:
    """Return the recorder of this process; None if it is not a rank of a run, or if the run records no steps."""
    folder, attempt = os.environ.get("TOOLKIT_RUN_DIR"), os.environ.get("TOOLKIT_ATTEMPT", "")
    rank = os.environ.get("TOOLKIT_RANK", "")
    if not folder or not attempt.isdigit() or not rank.isdigit():
        return None
    try:
        job = read_json(Path(os.environ.get("TOOLKIT_RESOLVED_JOB", "")))
        if not job.get("observe", {}).get("record", True):
            return None
        declared = declared_metrics(job)
    except (OSError, ToolkitError, AttributeError):
        return None
    try:
        launcher = int(os.environ.get("TOOLKIT_LAUNCHER_PID", "0"))
        ring = Ring.of_rank(RunDirectory(Path(folder)).run_id, int(attempt), int(rank), launcher)
    except FileExistsError:  # another process of this rank records its steps
        return None
    except OSError as error:  # must not end the program
        _say_once(f"cannot record the steps of this rank: {error.strerror}")
        return None
    recorder = Recorder(ring)
    recorder.end_reported = ScriptWaits(recorder).end
    for name in declared:  # the other names of a program must not use up its column
        recorder.column(name)
    atexit.register(recorder.write, is_last=True)
    return recorder


# A child process must not write to the ring of its parent.
os.register_at_fork(after_in_child=recorder_of_rank.cache_clear)


@cache
def _say_once(message: str) -> None:
    say_beside(message)
