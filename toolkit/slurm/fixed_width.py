"""Columns of fixed width, as Slurm's commands print them to a terminal: `squeue`, `sinfo`, `sacct`.

Cells may hold blanks, be empty, be cut to their column or fill it to the edge, and a column may lean to either side. So
the columns are found from the header and all rows together, and a row is cut there only where it fits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

Cells = tuple[str, ...]
Span = tuple[int, int]

SLIP = 3  # columns by which a row may lie beside its header, as when a name was replaced by a longer one
_WORD = re.compile(r"\S+")


def cut_rows(header: str, rows: Sequence[str]) -> list[Cells | None]:
    """The cells of each row; () for what is no row of its own, None where the columns of a row cannot be told apart."""
    ruler = next((row for row in rows if _is_ruler(row)), "")
    words = _spans(header)
    cuts = _cuts(words, rows, ruler)
    # A paste may lack the blanks before its header, or before its rows: then first words end above each other.
    end = max(_first_end(line) for line in [header, *rows])
    moved = [row if _is_ruler(row) else _shifted(row, end) for row in rows]
    words_moved = _spans(_shifted(header, end))
    cuts_moved = _cuts(words_moved, moved, ruler)
    if _fitting(moved, cuts_moved) > _fitting(rows, cuts):
        return _cut_all(moved, words_moved, cuts_moved)
    return _cut_all(rows, words, cuts)


def _fitting(rows: Sequence[str], cuts: list[int]) -> int:
    return sum(_by_position(row, cuts) is not None for row in rows if not _is_ruler(row))


def _cut_all(rows: Sequence[str], words: list[Span], cuts: list[int]) -> list[Cells | None]:
    cells: list[Cells | None] = []
    for number, row in enumerate(rows):
        if len(cells) > number:
            continue  # the second half of a record
        if _is_ruler(row):
            cells.append(())
            continue
        cells.append(_cut(row, words, cuts))
        if cells[-1] is None and number + 1 < len(rows):
            # A name may hold a line end, which takes one place of its column.
            whole = _cut(row + "\n" + rows[number + 1], words, cuts)
            if whole is not None:
                cells[-1:] = [whole, ()]
    return cells


def _spans(line: str) -> list[Span]:
    return [match.span() for match in _WORD.finditer(line)]


def _is_ruler(row: str) -> bool:
    """The line of dashes below the header of sacct."""
    return bool(row.strip()) and not row.replace("-", "").strip()


def _first_end(line: str) -> int:
    first = _WORD.search(line)
    return first.end() if first and not _is_ruler(line) else 0


def _shifted(line: str, end: int) -> str:
    """The line with as many blanks before it as its first word needs to end at column `end`."""
    return " " * (end - _first_end(line)) + line


def _cuts(words: list[Span], rows: Sequence[str], ruler: str) -> list[int]:
    """Where each column but the first begins."""
    dashes = _spans(ruler)
    if len(dashes) == len(words):
        return [start for start, _ in dashes[1:]]
    starts = [start for start, _ in words]
    steps = {later - sooner for sooner, later in pairwise(starts)}
    if len(words) > 2 and len(steps) == 1:
        return starts[1:]  # `--Format`: equal columns that lean left, without a blank between them
    whole = [row for row in rows if len(row.split()) >= len(words) - 1] or rows  # not the halves of a broken one
    cuts = []
    for (_, end), (start, _) in pairwise(words):
        # A column that leans right ends where its name ends; one that leans left makes the next begin with its name.
        places = [end, start, *range(end + 1, start)]
        cuts.append(max(places, key=lambda place: sum(_divides(place, row) for row in whole)))
    return cuts


def _divides(place: int, row: str) -> bool:
    return place >= len(row) or row[place].isspace() or row[place - 1].isspace()


def _cut(row: str, words: list[Span], cuts: list[int]) -> Cells | None:
    """Word by word where each stands at its name, so that a row that slipped is still read; else by position."""
    found = _spans(row)
    by_word = tuple(row[begin:end] for begin, end in found) if len(found) == len(words) else None
    if by_word and all(_near(word, name) for word, name in zip(found, words, strict=True)):
        return by_word
    return _by_position(row, cuts) or by_word


def _by_position(row: str, cuts: list[int]) -> Cells | None:
    if not cuts or len(row) < cuts[-1] or not (_is_grid(cuts) or all(_divides(place, row) for place in cuts)):
        return None
    cells = tuple(row[begin:end].strip() for begin, end in zip([0, *cuts], [*cuts, len(row)], strict=True))
    return cells if cells[0] and not any(letter.isspace() for letter in cells[0]) else None


def _near(word: Span, name: Span) -> bool:
    return word[0] - name[1] <= SLIP and name[0] - word[1] <= SLIP


def _is_grid(cuts: list[int]) -> bool:
    return len(cuts) > 1 and {later - sooner for sooner, later in pairwise([0, *cuts])} == {cuts[0]}
