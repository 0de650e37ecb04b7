"""Tables in the style of squeue: a header in capitals, aligned columns; a terminal cuts each line at its edge."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

import click

from toolkit.terminal.printable import clean, has_unicode

_BETWEEN = "  "
_LEAST_LAST = 12  # minimum width of the last column, whose strings have any length


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, shed: Sequence[str] = ()) -> None:
    """Print a line for each row, each column as wide as its widest value.

    On a terminal that is too narrow, the columns of `shed` are omitted, the first ones first, and longer lines are cut.
    A file or a pipe gets every column. The layout is our own because rich renders about 1,000 rows per second, and a
    history may have hundreds of thousands.
    """
    table = [header, *([clean(str(cell).replace("\n", " ")) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept = list(range(len(header))) if edge is None else _kept(header, widths, edge, shed)
    cut = "…" if has_unicode() else "~"
    for row in table:
        line = _BETWEEN.join(row[place].ljust(widths[place]) for place in kept).rstrip()
        click.echo(line if edge is None or len(line) <= edge else f"{line[: edge - 1]}{cut}")


def _kept(header: Sequence[str], widths: Sequence[int], edge: int, shed: Sequence[str]) -> list[int]:
    """The indexes of the columns that fit before the edge; the last one may be cut."""
    least = [*widths[:-1], min(widths[-1], _LEAST_LAST)]
    kept = list(range(len(header)))
    for title in shed:
        if sum(least[place] + len(_BETWEEN) for place in kept) - len(_BETWEEN) <= edge:
            break
        kept.remove(header.index(title))
    return kept
