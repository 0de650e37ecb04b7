"""Find the line of a log that states why a program ended, which is rarely the last one."""

import re
from collections.abc import Sequence

__all__ = ["fatal_line"]

# What launchers and toolkit print about a process that failed before, and messages that end no program.
_CONSEQUENCE = re.compile(
    r"(?i)slurmstepd(?:-\S+)?: error: \*\*\*|srun: error: .*: task.*: (?:exited with|terminated|killed|aborted)|job step aborted|"
    r"^toolkit: (?:attempt \d+|fix|next|    \|)[ :]|\bignor(?:ed|ing)\b|\bwarn(?:ing)?\b|\b(?:0|no) errors?\b"
)
# The first line of the first kind that a log has; an exception in a traceback counts as the second kind.
_KINDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i)\b(?:fatal|panic)(?: error)?\s*:",
        r"^\s*(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b",
        r"(?i)\berror\b[^:]{0,60}:|^\s*error\b",
        r"(?i)command not found|no such file or directory|permission denied|segmentation fault|core dumped|\bkilled\b|\baborted\b|"
        r"\bcannot\b",
    )
)  # fmt: skip
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def fatal_line(lines: Sequence[str]) -> str:
    """Return the first line with the cause of an end, of a traceback the exception; "" if no line looks like one."""
    found: list[str | None] = [None] * len(_KINDS)
    trace = ""  # what follows a traceback: its exception, or after that another traceback of the same chain
    for line in lines:
        if line.startswith(_TRACEBACK):
            trace = "exception" if trace in ("", "chain") else trace
        elif trace == "exception" and line.strip() and not line[0].isspace():
            found[1], trace = line, "end"
        elif trace == "end" and line.startswith(_CHAINED):
            trace = "chain"
        elif trace != "exception" and not _CONSEQUENCE.search(line):
            kind = next((number for number, one in enumerate(_KINDS) if one.search(line)), None)
            if kind is not None and found[kind] is None:
                found[kind] = line
    return next((line.strip() for line in found if line is not None), "")
