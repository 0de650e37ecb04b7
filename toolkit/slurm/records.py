"""Records in the output of a Slurm command with explicit columns, whatever names and comments contain.

Cells are separated by a mark that is new for each query, so that no name can contain it. A record starts and ends with
the same key. Anything that is neither a record nor a site's banner before the first one makes the whole answer
unreadable: a job whose record is damaged must not count as one that Slurm has forgotten.
"""

from __future__ import annotations

import re
import secrets

from toolkit.errors import SchedulerRefusedError

# What Slurm's commands print for a missing value.
NOTHING = frozenset({"", "(null)", "None", "NONE", "none", "N/A", "Unknown", "None assigned"})


def whole_number(text: str | None) -> int | None:
    """A count that Slurm prints; None for anything else, such as UNLIMITED."""
    return int(text) if text and text.isascii() and text.isdigit() else None  # "²" is a digit too, but not a number


class UnreadableError(SchedulerRefusedError):
    """A Slurm command printed something other than the requested records."""

    def __init__(self, command: str, line: str) -> None:
        super().__init__(f"{command}'s answer cannot be parsed: {line.strip()[:60]!r}")


def new_mark() -> str:
    """The mark that separates cells in one answer."""
    return f"~{secrets.token_hex(6)}~"


def read_records(
    command: str, text: str, mark: str, width: int, *, key: re.Pattern[str] | None = None
) -> list[list[str]]:
    """Each record's `width` cells; the mark follows every cell, and a line end follows the last one.

    Missing values ("N/A", "(null)", ...) are "". `key` is the form of the first cell of a record.

    Raises:
        UnreadableError: the answer of `command` contains something else.
    """
    *cells, rest = text.replace("\r\n", "\n").split(mark)
    if rest.strip():
        raise UnreadableError(command, rest)
    if not cells:
        return []
    greeting, _, cells[0] = cells[0].rpartition("\n")
    damaged = next((line for line in greeting.split("\n") if key is not None and key.match(line.strip())), None)
    if damaged is not None:
        raise UnreadableError(command, damaged)
    records = []
    for begin in range(0, len(cells), width):
        record = [cell.strip() for cell in cells[begin : begin + width]]
        in_place = cells[begin].startswith("\n") or not begin
        whole = len(record) == width and record[0] == record[-1] and (key is None or key.fullmatch(record[0]))
        if not in_place or not whole:
            raise UnreadableError(command, " ".join(record))
        records.append(["" if cell in NOTHING else cell for cell in record])
    return records
