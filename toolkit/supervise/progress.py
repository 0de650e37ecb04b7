"""The progress of a run: the last step of an attempt, changed files, and whether a failure recurred without progress."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import FILES_NAMED, AttemptRecord, MatchedFiles
from toolkit.rundir.files import is_unwritable, read_json_or_none
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause
from toolkit.supervise.error_lines import error_line
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say
from toolkit.supervise.symptoms import (
    COLLECTIVE_TIMEOUT,
    KILLED,
    NATIVE_CRASH,
    NODE_LOST,
    OUT_OF_MEMORY,
    PEER_LOST,
    SILENT,
)

__all__ = ["alike"]

_STEPS = (
    "print a line `toolkit: step N`, or set observe.step_line to a pattern of the lines that the program prints; "
    "call toolkit.step(N) if the entry is a Python file; "
)
_FILES = "files that the script writes, with the step in their names"
_UNLIMITED = "set restart.blind_requeues = -1"
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
_EXCEPTION = re.compile(r"(?:\w+\.)*(?P<name>[A-Z]\w*)(?=: | at |$)")
_POSITION = re.compile(r' at (?P<place>\S+:\d+)$|File "(?P<file>[^"]+)", line (?P<line>\d+)')
# A node, a device or a network may explain these, and another attempt may then succeed.
_OF_NODES = frozenset({KILLED.word, OUT_OF_MEMORY.word, PEER_LOST.word, NODE_LOST.word, SILENT.word})
_OF_DEVICES = re.compile(
    r"\bECC\b|fallen off the bus|\bXid\b|unspecified launch failure|uncorrectable|CUDA-capable device|device.* (?:busy|unavailable)|"
    r"hardware error|nccl(?:System|Remote|Internal|UnhandledCuda)Error|unhandled (?:system|cuda) error|remote process exited|NET/(?:IB|OFI)|"
    r"\bIBV?_|SIGBUS|Bus error|connection (?:reset|refused|closed|timed out)|network is unreachable|no route to host|"
    r"input/output error|stale file handle|transport endpoint",
    re.IGNORECASE,
)
# The reason of these names no error, so that only the rank shows whether two of them are alike.
_UNNAMED = frozenset({NATIVE_CRASH.word, COLLECTIVE_TIMEOUT.word, ""})
_VARYING = re.compile(r"\S*[\d/]\S*")  # numbers, paths, names with a number such as that of an unfinished checkpoint
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


def with_files(
    end: AttemptEnd, attempt: AttemptDirectory, pattern: str, before: dict[str, tuple[int, int]]
) -> AttemptEnd:
    """Return the end of an attempt with what `restart.progress` matched, which `matched_files.json` then contains.

    `before` is the state of the files when the attempt started.

    Raises:
        OSError: the file system does not respond.
    """
    after, run = state_of_files(pattern, attempt.run.whole.path), attempt.run
    earlier = [_matched_by(run.attempt(number)) for number in run.attempt_numbers() if number < attempt.number]
    listed = {name for one in earlier if one is not None for name in (*one.new, *one.before)}
    known = listed.union(before)
    changed = sorted(name for name in after if after[name] != before.get(name))
    rewritten, unchanged = [name for name in changed if name in known], sorted(after.keys() - set(changed))
    files = MatchedFiles(
        pattern, str(Path.cwd()), [name for name in changed if name not in known], sorted(before.keys() - listed),
        rewritten[:FILES_NAMED], len(rewritten), unchanged[:FILES_NAMED], len(unchanged),
    )  # fmt: skip
    try:
        files.write(attempt)
    except OSError as error:  # a full disk must not hide the end of the attempt
        if not is_unwritable(error):
            raise
        say(f"cannot write {attempt.matched_files}: {error.strerror}")
    return replace(end, changed_files=bool(changed), new_files=bool(files.new), files=str(files))


def _matched_by(attempt: AttemptDirectory) -> MatchedFiles | None:
    """Return what an earlier attempt matched; None if that is unknown, so that its files count as new."""
    try:
        return MatchedFiles.read(attempt)
    except ToolkitError as error:
        say(f"cannot read {attempt.matched_files}: {error.message}")
        return None


def why_repeated(
    earlier: Sequence[AttemptRecord], end: AttemptEnd, cause: Cause, *, tells_steps: bool, blind_requeues: int, continues: bool = False,
) -> str:  # fmt: skip
    """Return why another attempt is pointless: it ended like earlier ones, and made no progress; "" if it may help.

    A failed launch is retried twice, so only the third one in a row counts as repeated.

    Args:
        earlier: ends of the attempts since the last resume.
        cause: why the attempt ended, according to Slurm.
        tells_steps: True for a function, which reports its steps. A script that crashes without reporting any is
            repeated only if it raised the same exception at the same line, or if its last lines are alike.
        blind_requeues: `restart.blind_requeues`, the number of walltimes without progress at which a script ends. Files that
            were only rewritten allow one more start, because a program may continue from them.
        continues: whether `restart.argv` makes the program continue, so that files that were only rewritten are progress.
    """
    if _has_progress(earlier, end, continues=continues):
        return ""
    if cause is Cause.WALLTIME and not tells_steps:
        blind = 1 + _blind_walltimes(earlier, continues=continues)
        if blind_requeues < 0 or blind < blind_requeues + bool(end.changed_files):
            return ""
        times = "1 walltime" if blind == 1 else f"{blind} consecutive walltimes"
        return f"{times} without progress" + (f": {end.files}" if end.files else "")
    if not earlier or earlier[-1].cause is not cause:
        return ""
    if cause is Cause.LAUNCH_FAILED:  # Slurm may take a while to end an old step on a node
        times = "three times" if [one.cause for one in earlier[-2:]] == [cause] * 2 else ""
    elif cause is Cause.CRASHED:
        times = "twice" if _is_same_crash(earlier[-1], end, tells_steps=tells_steps) else ""
    else:
        times = "twice" if cause in (Cause.STALLED, Cause.WALLTIME) else ""
    return f"the same failure occurred {times} without a new step" if times else ""


def progress_fix(earlier: Sequence[AttemptRecord], end: AttemptEnd) -> str:
    """Return how a script can show progress, after an end at the walltime that shows none."""
    if end.step is not None:
        furthest = max((one.step for one in earlier if one.step is not None), default=end.step)
        return (
            f"this attempt came to step {end.step}, an earlier one had already reached step {furthest}: the program starts over. "
            f"Make it continue from what it saved (restart.argv), or raise job.time. Else {_UNLIMITED}"
        )
    if end.changed_files:
        return (
            "check that the program continues from these files instead of starting over: set restart.argv to the arguments with "
            f"which it does. If it does without, report progress: {_STEPS}or write files with the step in their names. Else {_UNLIMITED}"
        )
    pattern = f'set restart.progress to a pattern such as "out/step-*.pt" for {_FILES}'
    if end.files:
        pattern = f"correct restart.progress, which must match {_FILES}"
    continuing = "restart.argv then adds the arguments with which the program continues"
    return f"report progress in one of three ways: {_STEPS}or {pattern}; {continuing}. Else raise job.time, or {_UNLIMITED}"


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


def _is_same_crash(last: AttemptRecord, end: AttemptEnd, *, tells_steps: bool) -> bool:
    """Return whether two crashes have the same cause in the program, even if numbers, paths or the failing rank differ."""
    if _is_of_node(last) or _is_of_node(end) or last.exit_code != (end.exit_code or 1):
        return False
    seen, place = exception_of(end), _place_of(end.reason)
    is_named = end.symptom not in _UNNAMED or seen is not None
    if tells_steps and (is_named or last.rank == end.rank) and place == _place_of(last.reason):
        return alike([last.reason]) == alike([end.reason])
    if _has_any_progress(last) or _has_any_progress(end):
        return False
    if seen is not None and seen[1]:
        return seen == exception_of(last)
    # The lines of a healthy loop are alike, too, apart from their numbers.
    names_cause = error_line(end.last_lines) is not None or any(map(_is_fixed, end.last_lines))
    return names_cause and alike([end.reason, *end.last_lines]) == alike([last.reason, *last.last_lines])


def _is_fixed(line: str) -> bool:
    return bool(line.strip()) and _VARYING.search(line) is None


def _is_of_node(end: AttemptEnd | AttemptRecord) -> bool:
    """Return whether a node, a device or a network explains a failure."""
    shown = [end.reason, *(line for _, line in end.evidence), *end.last_lines]
    return end.symptom in _OF_NODES or any(map(_OF_DEVICES.search, shown))


def _place_of(reason: str) -> str:
    found = _POSITION.search(reason)
    return found[0] if found else ""


def alike(lines: Sequence[str]) -> list[str]:
    """Return lines without what varies between attempts, each only once, so that their number does not matter."""
    return list(dict.fromkeys(_VARYING.sub("#", line).strip() for line in lines if line.strip()))


def _blind_walltimes(earlier: Sequence[AttemptRecord], *, continues: bool) -> int:
    """Return how many of the last attempts reached the walltime without progress; preemptions between them are ignored."""
    blind = 0
    for at in range(len(earlier) - 1, -1, -1):
        one = earlier[at]
        if _has_progress(earlier[:at], one, continues=continues) or one.cause not in {Cause.WALLTIME, *_NOT_COUNTED}:
            break
        blind += one.cause is Cause.WALLTIME
    return blind


def _has_any_progress(end: AttemptEnd | AttemptRecord) -> bool:
    return end.step is not None or bool(end.changed_files)


def _has_progress(
    earlier: Sequence[AttemptRecord], end: AttemptEnd | AttemptRecord, *, continues: bool = False
) -> bool:
    """Return whether an attempt came further than earlier ones; `continues` is as in `why_repeated`."""
    reached = [one.step for one in earlier if one.step is not None]
    are_changes_enough = continues or end.new_files is None  # older records do not state `new_files`
    has_files = end.changed_files if are_changes_enough else end.new_files
    return bool(has_files) or (end.step is not None and end.step > max(reached, default=-1))
