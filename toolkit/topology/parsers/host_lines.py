"""Lines of a command's output as it was printed: without terminal escapes and what a launcher writes before each."""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])|\x0f")
_TIME = re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]? ", re.ASCII)
_HOST = re.compile(r"\[?[A-Za-z0-9][A-Za-z0-9_.,-]*\]?: ?")  # `pdsh`, `srun --label`, `mpirun --tag-output`
_MOST = 0.8  # of the lines have a prefix, so that a damaged one among them does not keep it in the others


class Line(NamedTuple):
    """One line that is not blank, its number counted from 1."""

    number: int
    text: str


def read_lines(text: str) -> tuple[list[Line], list[str]]:
    """The lines that are not blank, and warnings.

    A last line without a line end may be cut anywhere, in a number, too: it is named and left out.
    """
    pieces = [_ESCAPES.sub("", piece.removesuffix("\r")) for piece in text.split("\n")]
    warnings = []
    if pieces[-1].strip():
        warnings.append(f"line {len(pieces)}: no line end behind it, so that it may be cut; nothing is read from it")
    lines = [Line(number, piece.rstrip()) for number, piece in enumerate(pieces[:-1], 1) if piece.strip()]
    return _without_prefix(lines), warnings


def _without_prefix(lines: list[Line]) -> list[Line]:
    """Lines without the time and the one host name that stand before nearly all of them."""
    timed = sum(bool(_TIME.match(line.text)) for line in lines)
    if timed >= max(2, _MOST * len(lines)):
        lines = [Line(line.number, _TIME.sub("", line.text, count=1)) for line in lines]
    for line in lines[:2]:  # the first may be damaged itself
        host = _HOST.match(line.text)
        if host and sum(other.text.startswith(host[0].strip()) for other in lines) >= max(2, _MOST * len(lines)):
            return [Line(other.number, _without(other.text, host[0])) for other in lines]
    return lines


def _without(text: str, prefix: str) -> str:
    return text.removeprefix(prefix) if text.startswith(prefix) else text.removeprefix(prefix.strip())
