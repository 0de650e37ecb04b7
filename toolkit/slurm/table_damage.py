"""What shows that a table was damaged on its way although each of its rows can be read.

A table ends with a line end, has one header (or one below each cluster's name), does not print a row twice, names as many
nodes as it says, and the cells of fixed columns stand where their header's words begin or end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from toolkit.errors import ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING

Place = tuple[int, int]


def cut_end(text: str) -> tuple[str, ...]:
    """A warning where the last line has no line end."""
    end = text.rpartition("\n")[2]
    if not end.strip():
        return ()
    return (f"line {text.count(chr(10)) + 1}: has no line end, so that it may be cut: {end.strip()[-60:]!r}",)


def printed_twice(lines: Sequence[str], rows: Sequence[int]) -> Iterator[str]:
    """A warning for a row, given by its line from 1, that was printed before.

    Where several were, their columns do not tell rows apart, or names were taken out of them: nothing is said.
    """
    first: dict[str, int] = {}
    again = [
        (number, before) for number in rows if (before := first.setdefault(lines[number - 1].strip(), number)) != number
    ]
    if len(again) == 1:
        ((number, before),) = again
        yield f"line {number}: the same row stands on line {before}"


def second_headers(lines: Sequence[str], header: str, is_heading: Callable[[str], bool]) -> Iterator[str]:
    """A warning for each header but the first that no heading announces."""
    seen, before = False, ""
    for number, line in enumerate(lines, 1):
        if line.split() == header.split():
            if seen and not is_heading(before):
                yield f"line {number}: the header stands there again"
            seen = True
        before = line if line.strip() else before


def beside_header(header: str, rows: Sequence[tuple[int, str, tuple[str, ...]]]) -> Iterator[str]:
    """A warning for each row, given by its line, its text and its cells, that does not stand below the header as others do.

    One row alone tells nothing: a name may have been replaced by a longer one, or blanks lost before the header.
    """
    names = _places(header, header.split())
    if names is None or "  " not in header.strip() or not header.isascii():
        return
    found = ((number, _places(line, cells)) for number, line, cells in rows if line.isascii())
    shifts = {number: _shifts(names, places) for number, places in found if places is not None}
    count = Counter(shift for fitting in shifts.values() for shift in fitting)
    usual = max(count, key=lambda shift: (count[shift], shift == 0), default=None)
    for number, fitting in shifts.items():
        if usual is not None and usual not in fitting:
            yield f"line {number}: its cells do not stand below the header's words as those of other rows do"


def other_count(line: int, count: str | None, nodes: str | None) -> tuple[str, ...]:
    """A warning where a row's list of nodes cannot be read, or names more or fewer than the row says."""
    if not nodes or nodes.startswith("(") or nodes in NOTHING:
        return ()
    try:
        named = len(expand_hostlist(nodes))
    except ToolkitError as error:
        return (f"line {line}: {error.message}",)
    if count and count.isdecimal() and int(count) != named:
        return (f"line {line}: says {count} nodes and names {named}: {nodes[:60]!r}",)
    return ()


def _shifts(names: Sequence[Place | None], places: Sequence[Place | None]) -> set[int]:
    """By how many places the row lies to the right, for all of its cells alike: none, where they differ."""
    fitting: set[int] | None = None
    for name, place in zip(names, places, strict=True):
        if name and place:
            here = {place[0] - name[0], place[1] - name[1]}
            fitting = here if fitting is None else fitting & here
    return {0} if fitting is None else fitting


def _places(line: str, cells: Sequence[str]) -> list[Place | None] | None:
    """Where each cell begins and ends; None for an empty one, and for all where one cannot be found."""
    places: list[Place | None] = []
    at = 0
    for cell in cells:
        begin = line.find(cell, at)
        if begin < 0:
            return None
        places.append((begin, begin + len(cell)) if cell else None)
        at = begin + len(cell)
    return places
