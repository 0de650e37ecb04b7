"""The progress of a run: the last step of an attempt, changed files, and whether a failure recurred without progress."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say

PROGRESS_FIX = (
    "report progress in one of three ways: print a line `toolkit: step N`; call toolkit.step(N) if the entry is a Python file; "
    'or set restart.progress to a pattern such as "out/*.pt" for files that the script writes. Else raise job.time, or set '
    "restart.blind_requeues = -1"
)
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
_EXCEPTION = re.compile(r"(?:\w+\.)*(?P<name>[A-Z]\w*)(?=: | at |$)")
_POSITION = re.compile(r' at (?P<place>\S+:\d+)$|File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_COUNTED = frozenset({Cause.PREEMPTED, Cause.NODE_LOST, Cause.SUPERVISOR_LOST})  # they say nothing about a script


def last_step(attempt: AttemptDirectory) -> int | None:
    """Return the last step that rank 0 recorded; None if it has not recorded one yet.

    The heartbeat is written at most once a second, so in fast loops the metrics are ahead of it. If a lost node left a
    truncated heartbeat, only the metrics count.
    """
    steps = []
    try:
        beat = read_json_or_none(attempt.heartbeat)
        steps += [int(beat["step"])] if beat is not None else []
    except ToolkitError as error:  # a lost node may truncate the heartbeat, written without fsync
        say(f"cannot read the last heartbeat of attempt {attempt.number}: {error}")
    record = last_record(attempt.run.metrics / "train.jsonl")
    if record is not None and record.attempt == attempt.number:
        steps.append(record.step)
    return max(steps, default=None)


def state_of_files(pattern: str, run: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of each file that `restart.progress` matches, relative to the working directory of the run.

    Files of toolkit in the run directory `run` are excluded: logs always change.
    """
    state = {}
    # Path.glob accepts no absolute pattern.
    names = glob.glob(str(Path(pattern).expanduser()), recursive=True) if pattern else []  # noqa: PTH207
    own = [run.resolve() / name for name in ("attempts", "starts", "control")]
    for path in names:
        # Path.resolve raises an error for a loop of links.
        if any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in own):
            continue
        try:
            status = Path(path).stat()
        except OSError:  # removed meanwhile, as expired checkpoints are
            continue
        state[path] = (status.st_mtime_ns, status.st_size)
    return state


def why_repeated(
    earlier: Sequence[AttemptRecord], end: AttemptEnd, cause: Cause, *, tells_steps: bool, blind_requeues: int
) -> str:
    """Return why another attempt is pointless: it ended like earlier ones, and made no progress; "" if it may help.

    A failed launch is retried twice, so only the third one in a row counts as repeated.

    Args:
        earlier: ends of the attempts since the last resume.
        cause: why the attempt ended, according to Slurm.
        tells_steps: True for a function, which reports its steps. A script that crashes without reporting any is
            repeated only if it raised the same exception at the same line.
        blind_requeues: `restart.blind_requeues`, the number of walltimes without progress at which a script ends.
    """
    if _has_progress(earlier, end):
        return ""
    if cause is Cause.WALLTIME and not tells_steps:
        blind = 1 + _blind_walltimes(earlier)
        return f"{blind} consecutive walltimes without progress" if 0 < blind_requeues <= blind else ""
    if not earlier or earlier[-1].cause is not cause:
        return ""
    if cause is Cause.LAUNCH_FAILED:  # Slurm may take a while to end an old step on a node
        times = "three times" if [one.cause for one in earlier[-2:]] == [cause] * 2 else ""
    elif cause is Cause.CRASHED:
        times = "twice" if _is_same_crash(earlier, end, tells_steps=tells_steps) else ""
    else:
        times = "twice" if cause in (Cause.STALLED, Cause.WALLTIME) else ""
    return f"the same failure occurred {times} without a new step" if times else ""


def is_import_failure(earlier: Sequence[AttemptRecord], end: AttemptEnd) -> bool:
    """Return whether a rank could not import its modules, or parse its script, before the run made any progress."""
    seen = exception_of(end)
    has_progress = _has_any_progress(end) or any(map(_has_any_progress, earlier))
    return end.cause is Cause.CRASHED and seen is not None and seen[0] in _IMPORT_ERRORS and not has_progress


def exception_of(end: AttemptEnd | AttemptRecord) -> tuple[str, str] | None:
    """Return the name of the exception that ended a rank, and the line that raised it; None if there is none.

    A program reports both only in its last lines: the exception is the last one, and makes Python exit with code 1.
    """
    lines = [line.strip() for line in end.last_lines if line.strip()]
    has_traceback = end.exit_code == 1 and any(line.startswith('File "') for line in lines)
    for shown in ([end.reason], lines if has_traceback else []):
        match = _EXCEPTION.match(shown[-1]) if shown else None
        if match is not None:
            places = [one["place"] or f"{one['file']}:{one['line']}" for one in map(_POSITION.search, shown) if one]
            return match["name"], "".join(places[-1:])
    return None


def _is_same_crash(earlier: Sequence[AttemptRecord], end: AttemptEnd, *, tells_steps: bool) -> bool:
    last = earlier[-1]
    if tells_steps and (last.rank, last.reason) == (end.rank, end.reason):
        return True
    seen = exception_of(end)
    is_early = not _has_any_progress(last) and not _has_any_progress(end)
    return is_early and seen is not None and bool(seen[1]) and seen == exception_of(last)


def _blind_walltimes(earlier: Sequence[AttemptRecord]) -> int:
    """Return how many of the last attempts reached the walltime without progress; preemptions between them are ignored."""
    blind = 0
    for at in range(len(earlier) - 1, -1, -1):
        if _has_progress(earlier[:at], earlier[at]) or earlier[at].cause not in {Cause.WALLTIME, *_NOT_COUNTED}:
            break
        blind += earlier[at].cause is Cause.WALLTIME
    return blind


def _has_any_progress(end: AttemptEnd | AttemptRecord) -> bool:
    return end.step is not None or bool(end.changed_files)


def _has_progress(earlier: Sequence[AttemptRecord], end: AttemptEnd | AttemptRecord) -> bool:
    reached = [one.step for one in earlier if one.step is not None]
    return bool(end.changed_files) or (end.step is not None and end.step > max(reached, default=-1))
