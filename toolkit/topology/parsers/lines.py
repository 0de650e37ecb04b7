"""The lines of a text that another command printed, as its reader would have seen them on the screen.

What a terminal, a pipe or a log adds is taken away: escapes, carriage returns, and what stands before every line (the time
that a log writes, `node1: ` of pdsh and srun -l).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # the title of a window, a link
    r"|\x1b[ -/]+[0-~]|\x1b[0-Z\\^-~]"  # alphabets, keyboard
)
_TIME = re.compile(
    r"\[?(?:\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2} [ \d]\d )\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?: |\t|$)",
    re.ASCII,
)
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*: ?", re.ASCII)


class Line(NamedTuple):
    """One line: its number in the text, from 1, and its text without the line end; blanks before it are kept."""

    number: int
    text: str


def lines_of(text: str) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Every line, also the empty ones, and a warning where the last one has no line end: it may be cut there.

    Form feeds and the like do not end a line, as they would for `str.splitlines`: they may stand in names.
    """
    plain = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n" if "\n" not in text else "")
    lines = plain.split("\n")
    warnings: tuple[str, ...] = ()
    if lines[-1] == "":
        lines.pop()
    elif lines[-1].strip():
        warnings = (f"line {len(lines)}: has no line end, so that it may be cut: {lines[-1].strip()[-60:]!r}",)
    return tuple(Line(number, line) for number, line in enumerate(without_prefix(lines), 1)), warnings


def without_prefix(lines: list[str]) -> list[str]:
    """The lines without the time, and without the name and colon, that stand before every one that is not empty."""
    printed = [line for line in lines if line.strip()]
    if len(printed) > 1 and all(_TIME.match(line) for line in printed):
        lines = [_TIME.sub("", line, count=1) for line in lines]
        printed = [line for line in lines if line.strip()]
    named = _NAMED.match(printed[0]) if len(printed) > 1 else None
    if named and all(line.startswith(named[0].rstrip()) for line in printed):
        lines = [line.removeprefix(named[0].rstrip()).removeprefix(" " * named[0].endswith(" ")) for line in lines]
    return lines
