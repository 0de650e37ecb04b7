"""Columns of fixed width, as Slurm's commands print them to a terminal: `squeue`, `sinfo`, `sacct`.

Cells may hold blanks, be empty, be cut to their column or fill it to the edge, and a column may lean to either side. So
the columns are found from the header and all rows together, and a row is cut there only where it fits. Slurm counts
bytes, not letters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Cells = tuple[str, ...]
Span = tuple[int, int]

SLIP = 3  # columns by which a row may lie beside its header, as when a name was replaced by a longer one
# Columns whose words somebody chose, who may have put a line end among them.
MAY_BREAK = frozenset(
    {"NAME", "JOBNAME", "COMMENT", "ADMINCOMMENT", "SYSTEMCOMMENT", "REASON", "WORKDIR", "SUBMITLINE"}
)
MOST_LINES = 5  # of one record
_WORD = re.compile(r"[^ \t\r\n]+")
_BLANK = frozenset(" \t\r\n")
_REST = "\udc00"  # stands for each further byte of a letter; no text that was decoded holds it
_BEYOND_ASCII = re.compile(r"[^\0-\x7f\ufffd]")  # U+FFFD stands for the one byte that was left of a letter


@dataclass(frozen=True)
class _Layout:
    """Where the names stand and where each column but the first begins."""

    spans: list[Span]
    cuts: list[int]
    begins_free: bool = False  # the first column holds words that somebody chose, as `sinfo -R` does
    touching: bool = False  # no blank need divide two cells
    has_widths: bool = True  # else each row has columns of its own, with one blank between two (`-o "%i %T %R"`)
    trusted: bool = True  # rows may be cut at `cuts`

    def by_position(self, row: str) -> Cells | None:
        if not self.trusted or not self.cuts or len(row) < self.cuts[-1]:
            return None
        if not self.touching and not all(_divides(place, row) for place in self.cuts):
            return None
        edges = pairwise([0, *self.cuts, len(row)])
        cells = tuple(row[begin:end].strip() for begin, end in edges)
        return cells if _WORD.fullmatch(cells[0]) or (self.begins_free and self.has_widths and cells[0]) else None

    def by_word(self, row: str) -> Cells | None:
        """One word for each name, at most SLIP columns beside it; without widths one cell, maybe empty, behind each blank."""
        if not self.has_widths:
            cells = tuple(row.split(" "))
            return cells if len(cells) == len(self.spans) and cells[0] else None
        found = _spans(row)
        if len(found) != len(self.spans) or not all(map(_near, found, self.spans)):
            return None
        return tuple(row[begin:end] for begin, end in found)

    def cut(self, row: str) -> Cells | None:
        """Word by word where each stands at its name, so that a row that slipped is still read; else by position."""
        return self.by_word(row) or self.by_position(row)


def cut_rows(header: str, rows: Sequence[str], *, key: re.Pattern[str] | None = None) -> list[Cells | None]:
    """The cells of each row; () for what is no row of its own, None where the columns of a row cannot be told apart.

    `key` is the form of a row's first word: a line that begins so is never the second half of a record.
    """
    names = header.split()
    if header.endswith(" ") and not header.endswith("  "):  # a format that ends with a blank, as do the rows then
        header, rows = header[:-1], [row.removesuffix(" ") for row in rows]
    header, rows = _in_bytes(header), [_in_bytes(row) for row in rows]
    layout = _layout(header, rows)
    # A paste may lack the blanks before its header, or before its rows: then first words end above each other. A row
    # with one word at each name proves it; one that was cut may seem to fit anywhere.
    end = max(_first_end(line) for line in [header, *rows])
    moved = [row if _is_ruler(row) else _shifted(row, end) for row in rows]
    layout_moved = _layout(_shifted(header, end), moved)
    proven = not layout.touching and any(layout_moved.by_word(row) for row in moved)
    if proven and _fitting(moved, layout_moved) > _fitting(rows, layout):
        rows, layout = moved, layout_moved
    return [cells and tuple(cell.replace(_REST, "") for cell in cells) for cells in _cut_all(rows, layout, names, key)]


def _fitting(rows: Sequence[str], layout: _Layout) -> int:
    return sum(layout.by_position(row) is not None for row in rows if not _is_ruler(row))


def _cut_all(
    rows: Sequence[str], layout: _Layout, names: Sequence[str], key: re.Pattern[str] | None
) -> list[Cells | None]:
    cells: list[Cells | None] = []
    while len(cells) < len(rows):
        number = len(cells)
        if _is_ruler(rows[number]):
            cells.append(())
            continue
        cells.append(layout.cut(rows[number]))
        if cells[-1] is None:
            whole, used = _joined(rows[number : number + MOST_LINES], layout, names, key)
            cells[-1:] = [whole, *[()] * (used - 1)]
    return cells


def _joined(
    rows: Sequence[str], layout: _Layout, names: Sequence[str], key: re.Pattern[str] | None
) -> tuple[Cells | None, int]:
    """The record that begins in the first row and goes on behind a line end in a name: its cells, and on how many lines."""
    for used in range(2, len(rows) + 1):
        last = rows[used - 1]
        first_word = _WORD.search(last)
        by_itself = key is not None and first_word is not None and key.fullmatch(first_word[0])
        if by_itself or _is_ruler(last) or layout.cut(last) is not None:
            break
        cells = layout.by_position("\n".join(rows[:used]))  # the line end takes one place of its column
        if cells is not None and all(
            name.upper() in MAY_BREAK for name, cell in zip(names, cells, strict=True) if "\n" in cell
        ):
            return cells, used
    return None, 1


def _in_bytes(line: str) -> str:
    """The line with one place for each of its bytes."""
    return _BEYOND_ASCII.sub(lambda letter: letter[0] + _REST * (len(letter[0].encode("utf-8", "replace")) - 1), line)


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


def _layout(header: str, rows: Sequence[str]) -> _Layout:
    spans = _spans(header)
    starts = [start for start, _ in spans]
    begins_free = header.split()[0].upper() in MAY_BREAK
    dashes = _spans(next((row for row in rows if _is_ruler(row)), ""))
    if len(dashes) == len(spans):
        return _Layout(spans, [start for start, _ in dashes[1:]], begins_free)
    if _is_grid(header, spans, rows):
        return _Layout(spans, starts[1:], begins_free, touching=True)
    whole = [row for row in rows if len(row.split()) >= len(spans) - 1] or rows  # not the halves of a broken one
    cuts = []
    for (_, end), (start, _) in pairwise(spans):
        # A column that leans right ends where its name ends; one that leans left makes the next begin with its name.
        places = [end, start, *range(end + 1, start)]
        cuts.append(max(places, key=lambda place: sum(_divides(place, row) for row in whole)))
    has_widths = any(start - end > 1 for (_, end), (start, _) in pairwise(spans))
    trusted = has_widths or all(_divides(place, row) for place in cuts for row in whole)
    return _Layout(spans, cuts, begins_free, has_widths=has_widths, trusted=trusted)


def _is_grid(header: str, spans: list[Span], rows: Sequence[str]) -> bool:
    """`--Format`: equal columns that lean left and hold their names, without a blank between them."""
    starts = [start for start, _ in spans]
    steps = {later - sooner for sooner, later in pairwise(starts)}
    if len(steps) != 1 or starts[0]:
        return False
    (step,) = steps
    longest = max(end - start for start, end in spans)
    wide = step > longest + 1 and all(len(row.rstrip()) <= step * len(spans) for row in rows)
    return wide and (len(spans) > 2 or len(header) == step * len(spans))


def _divides(place: int, row: str) -> bool:
    return place >= len(row) or row[place] in _BLANK or row[place - 1] in _BLANK


def _near(word: Span, name: Span) -> bool:
    return word[0] - name[1] <= SLIP and name[0] - word[1] <= SLIP
