"""Records that a command of Slurm's prints in the columns that we ask for, whatever stands in names and comments.

Cells are divided by a mark that is made anew for each question, so that nobody can have written it into a name. A record
begins and ends with the same key, and one that does not ends the reading: what follows has lost its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

_NOTHING = frozenset({"", "(null)", "None", "NONE", "N/A", "Unknown", "None assigned"})


def new_mark() -> str:
    """What divides cells in one answer."""
    return f"~{secrets.token_hex(6)}~"


def read_records(text: str, mark: str, width: int) -> Iterator[list[str]]:
    """Each record's `width` cells; every cell has the mark behind it, and a line end follows the last one.

    What stands for nothing ("N/A", "(null)", ...) is "".
    """
    cells = text.split(mark)[:-1]
    for begin in range(0, len(cells), width):
        record = cells[begin : begin + width]
        if begin and not record[0].startswith("\n"):
            return
        record = [cell.strip() for cell in record]
        if len(record) < width or record[0] != record[-1]:
            return
        yield ["" if cell in _NOTHING else cell for cell in record]
