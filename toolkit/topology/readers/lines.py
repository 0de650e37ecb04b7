"""The lines of another command's output, without what terminals, pipes and logs add to them.

toolkit removes escapes, carriage returns, and the prefix of every line (the time of a log, `node1: ` of pdsh and srun -l).

All readers have one rule for damage: unknown and named, never wrong. A line that has not the form of its command gives
no fact, no reader repairs one, and what depends on all lines (a count) is unknown then. `first_damaged` names the line.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import CheckFailedError

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
    """One line: its number in the text, from 1, and its text without the line end."""

    number: int
    text: str


def lines_of(text: str) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Every line, also the empty ones, and a warning if the last one has no line end: it may be cut.

    `str.splitlines` would also break lines at form feeds and the like, which names may contain.
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
    """The lines without the time, and without the name and colon, that every line begins with unless it is empty."""
    printed = [line for line in lines if line.strip()]
    if len(printed) > 1 and all(_TIME.match(line) for line in printed):
        lines = [_TIME.sub("", line, count=1) for line in lines]
        printed = [line for line in lines if line.strip()]
    named = _NAMED.match(printed[0]) if len(printed) > 1 else None
    if named and all(line.startswith(named[0].rstrip()) for line in printed):
        lines = [line.removeprefix(named[0].rstrip()).removeprefix(" " * named[0].endswith(" ")) for line in lines]
    return lines


def read_lines(text: str) -> tuple[list[Line], list[str]]:
    """The lines that are not blank, without trailing spaces, and warnings.

    A last line without a line end may be cut anywhere, also in a number: it is named and not read.
    """
    lines, warnings = lines_of(text)
    whole = lines[:-1] if warnings else lines
    return [Line(line.number, line.text.rstrip()) for line in whole if line.text.strip()], list(warnings)


def read_lines_with_hosts(text: str) -> tuple[list[Line], list[str]]:
    """As `read_lines`, but every line keeps its prefix: in a log it names the process that wrote the line."""
    pieces = text.split("\n")
    last, warnings = lines_of(pieces[-1])
    lines = [
        Line(number, " ".join(line.text for line in lines_of(piece)[0]).rstrip())
        for number, piece in enumerate(pieces[:-1], 1)
    ]
    cut = [warning.replace("line 1:", f"line {len(pieces)}:", 1) for warning in warnings if last]
    return [line for line in lines if line.text.strip()], cut


def refusal(command: str, lines: Sequence[Line]) -> CheckFailedError:
    """The error for input that is not the output of a command."""
    shown = f"{lines[0].text.strip()[:60]!r}" if lines else "an empty text"
    return CheckFailedError(
        f"expected the output of {command}, got {shown}", where=f"line {lines[0].number if lines else 1}"
    )


def first_damaged(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warning of the first damaged line, and how many more there are."""
    first = min(warnings, key=_line_of, default="")
    more = len(warnings) - 1
    return (first + (f" (and {more} more)" if more else ""),) if first else ()


def _line_of(warning: str) -> int:
    return int(warning.removeprefix("line ").partition(":")[0])
