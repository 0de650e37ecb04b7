"""Tables as squeue's: a header in capitals, aligned columns; on a terminal each line ends at its edge."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

import click

from toolkit.terminal.character_set import has_unicode
from toolkit.terminal.printable import clean

_BETWEEN = "  "
_LEAST_LAST = 12  # letters that the last column, a text of any length, keeps at least


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, shed: Sequence[str] = ()) -> None:
    """Print a line for each row, each column as wide as its widest value.

    On a terminal that is too narrow the columns of `shed` are left out, the least needed first, and what is longer still
    is cut. Into a file or a pipe goes all. By hand, since rich lays out some 1,000 rows a second, and a history may have
    hundreds of thousands.
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
    """The places of the columns that stand side by side before the edge, the last one maybe cut."""
    least = [*widths[:-1], min(widths[-1], _LEAST_LAST)]
    kept = list(range(len(header)))
    for title in shed:
        if sum(least[place] + len(_BETWEEN) for place in kept) - len(_BETWEEN) <= edge:
            break
        kept.remove(header.index(title))
    return kept
