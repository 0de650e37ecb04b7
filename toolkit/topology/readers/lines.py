"""Split the output of another command into lines, without what terminals, pipes and logs add to them.

toolkit removes escape sequences, carriage returns, and a prefix of all lines (log times, `node1: ` of pdsh and srun -l).

All readers treat damaged output alike. A reader ignores a line that does not have the format of its command, and a
warning names the first such line. Values that depend on all lines, such as counts, are then unknown (null).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import CheckFailedError

_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI sequences: colors and cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC sequences: window titles and links
    r"|\x1b[ -/]+[0-~]|\x1b[0-Z\\^-~]"  # selection of character sets and keyboard modes
)
_TIME = re.compile(
    r"\[?(?:\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2} [ \d]\d )\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?: |\t|$)",
    re.ASCII,
)
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*: ?", re.ASCII)


class Line(NamedTuple):
    """One line: its number in the output, from 1, and its text without the line end."""

    number: int
    text: str


def lines_of(text: str) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Return every line, including empty ones, and a warning if the last line has no newline and may be truncated.

    `str.splitlines` would also split at form feeds and similar characters, which names may contain.
    """
    plain = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n" if "\n" not in text else "")
    lines = plain.split("\n")
    warnings: tuple[str, ...] = ()
    if lines[-1] == "":
        lines.pop()
    elif lines[-1].strip():
        warnings = (f"line {len(lines)}: no newline at the end, so it may be truncated: {lines[-1].strip()[-60:]!r}",)
    return tuple(Line(number, line) for number, line in enumerate(without_prefix(lines), 1)), warnings


def without_prefix(lines: list[str]) -> list[str]:
    """Return the lines without a time stamp or a `name:` prefix, if all lines that are not empty have one."""
    printed = [line for line in lines if line.strip()]
    if len(printed) > 1 and all(_TIME.match(line) for line in printed):
        lines = [_TIME.sub("", line, count=1) for line in lines]
        printed = [line for line in lines if line.strip()]
    named = _NAMED.match(printed[0]) if len(printed) > 1 else None
    if named and all(line.startswith(named[0].rstrip()) for line in printed):
        lines = [line.removeprefix(named[0].rstrip()).removeprefix(" " * named[0].endswith(" ")) for line in lines]
    return lines


def read_lines(text: str) -> tuple[list[Line], list[str]]:
    """Return the lines that are not blank, without trailing spaces, and warnings.

    A last line without a newline may be truncated, even inside a number, so it is omitted and a warning names it.
    """
    lines, warnings = lines_of(text)
    whole = lines[:-1] if warnings else lines
    return [Line(line.number, line.text.rstrip()) for line in whole if line.text.strip()], list(warnings)


def read_lines_with_hosts(text: str) -> tuple[list[Line], list[str]]:
    """Return the same as `read_lines`, but keep prefixes, which name the process that wrote a log line."""
    pieces = text.split("\n")
    last, warnings = lines_of(pieces[-1])
    lines = [
        Line(number, " ".join(line.text for line in lines_of(piece)[0]).rstrip())
        for number, piece in enumerate(pieces[:-1], 1)
    ]
    cut = [warning.replace("line 1:", f"line {len(pieces)}:", 1) for warning in warnings if last]
    return [line for line in lines if line.text.strip()], cut


def refusal(command: str, lines: Sequence[Line]) -> CheckFailedError:
    """Return the error for input that is not the output of `command`."""
    shown = f"{lines[0].text.strip()[:60]!r}" if lines else "empty input"
    return CheckFailedError(
        f"expected the output of {command}, got {shown}", where=f"line {lines[0].number if lines else 1}"
    )


def first_damaged(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the warning about the first damaged line, with the number of further warnings."""
    first = min(warnings, key=_line_of, default="")
    more = len(warnings) - 1
    return (first + (f" (and {more} more)" if more else ""),) if first else ()


def _line_of(warning: str) -> int:
    return int(warning.removeprefix("line ").partition(":")[0])
