"""Find the line of a log that states why a program ended, which is rarely the last one."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["CHILD_DIED", "CONSEQUENCE", "ErrorLine", "error_line", "users_position"]

LINE_CHARACTERS = 300  # of a log line in a reason
# Messages of a rank that lost its connection to a failed rank. This rank fails a moment later, and is not the culprit.
CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket ?timeout|store|peer|dump signal|"
    r"; rank \d+ did not (?:come|join)|came and gave up waiting|joined and timed out",  # the wording differs by release
    re.IGNORECASE,
)
# Reasons of a rank whose own child process failed, and printed why.
CHILD_DIED = re.compile(r"exited unexpectedly|terminated abruptly|returned non-zero exit status|BrokenProcessPool")
_OF_OTHERS = re.compile(
    rf"(?i:{CONSEQUENCE.pattern})|{CHILD_DIED.pattern}|ChildFailedError|^KeyboardInterrupt|MPI_ABORT"
)
# The rank in front of a line: of `srun --label`, of torch or torchrun, of Open MPI, or of toolkit.
_LABEL = re.compile(
    r"(?: *(?P<task>\d+): )?(?:\[(?:rank(?P<rank>\d+)|default\d+|\d+|\d+,(?P<process>\d+))\](?:<std(?:out|err)>)?:? ?)?"
)
# What launchers and toolkit print about a process that failed before, and messages that end no program.
_NO_CAUSE = re.compile(
    r"(?i)slurmstepd(?:-\S+)?: error: \*\*\*|srun: error: .*: task.*: (?:exited with|terminated|killed|aborted)|job step aborted|"
    r"^toolkit: (?:attempt \d+|fix|next|    \|)[ :]|\bignor(?:ed|ing)\b|\bwarn(?:ing)?\b|\b(?:0|no) errors?\b|"
    r"\bcontinuing\b|\bretrying\b|not a git repository|"
    r"error\b[^:=]{0,60}[:=]\s*[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)\s*(?:$|[%,;|)]|\w+\s*[:=])"  # a metric
)
_NAMED, _KILLED, _WEAK, _OTHERS = 0, 2, 3, 4
# Kinds of lines, the most specific first. Programs may continue after the last kind, so that it counts least.
_KINDS = (
    (_NAMED, re.compile(r"(?i:\b(?:fatal|panic)(?: error)?\s*:)|^\s*(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b")),
    (1, re.compile(r"(?i)\berror\b[^:]{0,60}:|^\s*error\b")),
    (_WEAK, re.compile(
        r"(?i)command not found|no such file or directory|permission denied|segmentation fault|core dumped|(?:^|: ) *(?:\d+ +)?(?:killed|aborted)\b(?! \S)")),
    (5, re.compile(r"(?i)\bcannot\b")),
)  # fmt: skip
_KILLED_TASK = re.compile(
    r"^srun: error: \S+: task (?P<task>\d+)\b.*: (?:Killed|Aborted|Segmentation fault|Bus error|Illegal instruction|Floating point)"
)
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIBRARIES = re.compile(r"-packages/|/lib(?:64)?/python3\.\d+/|^<")
_TOOLKIT = f"{Path(__file__).parents[1]}/"


class ErrorLine(NamedTuple):
    """The line of an error as it is in the log, and its text without the label of its rank, if it has one.

    `position` is that of the user's code in the traceback. `is_cause` is false for a message about another process.
    """

    line: str
    text: str
    rank: int | None = None
    position: str = ""
    is_cause: bool = True

    def __str__(self) -> str:
        return (f"rank {self.rank}: " if self.rank is not None else "") + self.text + self.position


def error_line(lines: Sequence[str]) -> ErrorLine | None:
    """Return the line with the cause of an end, of a traceback the exception; None if no line looks like one.

    A cause precedes what follows from it in other processes. A program may log an exception and continue, so its last
    one counts; of several ranks, the first that failed.
    """
    found: dict[int, ErrorLine] = {}
    for kind, seen in _errors(lines):
        is_later = kind == _WEAK or (kind == _NAMED and seen.rank in (None, found.get(kind, seen).rank))
        if kind not in found or is_later:
            found[kind] = seen
    return found[min(found)] if found else None


def _errors(lines: Sequence[str]) -> Iterator[tuple[int, ErrorLine]]:
    """Yield each line that looks like an error with its kind; lower kinds are more specific."""
    traces: dict[str, list[str]] = {}  # by label: tracebacks of several ranks may alternate
    for at, line in enumerate(lines):
        label = _LABEL.match(line)
        prefix = label[0] if label else ""
        number = next((one for one in label.groups()[::-1] if one), None) if label else None
        text, rank, trace = line.removeprefix(prefix), int(number) if number else None, traces.get(prefix)
        if text.startswith(_TRACEBACK):
            traces[prefix] = [text]
        elif trace is not None and (text[:1].isspace() or not text):
            trace.append(text)
        elif (level := _NAMED if trace is not None else _kind_of(text)) is not None:
            is_cause = _OF_OTHERS.search(text) is None
            if level == _KILLED and (task := _KILLED_TASK.match(text)):
                rank = int(task["task"])
            if text.rstrip().endswith(":") and at + 1 < len(lines):  # `Error in f(x) :`
                text = f"{text.strip()} {lines[at + 1].removeprefix(prefix).strip()}"
            position = users_position(traces.pop(prefix, []))
            error = ErrorLine(line.strip(), text.strip()[:LINE_CHARACTERS], rank, position, is_cause)
            yield (level if is_cause else max(_OTHERS, level)), error


def _kind_of(text: str) -> int | None:
    if _KILLED_TASK.match(text):
        return _KILLED
    return None if _NO_CAUSE.search(text) else next((kind for kind, one in _KINDS if one.search(text)), None)


def users_position(traceback: Sequence[str]) -> str:
    """Return the position of the innermost frame outside of libraries, as ` at late.py:8`; "" if there is none."""
    frames = filter(None, map(_FRAME.match, reversed(traceback)))
    own = (one for one in frames if not _LIBRARIES.search(one["file"]) and not one["file"].startswith(_TOOLKIT))
    return next((f" at {one['file'].rpartition('/')[2]}:{one['line']}" for one in own), "")
