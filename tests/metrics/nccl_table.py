"""What tests read of a table in the columns of nccl-tests."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANK = re.compile(r"#\s+Rank\s+[0-9]+ .* on\s+(\S+) device")
_ROW = re.compile(
    r"\s*([0-9]+)\s+([0-9]+)\s+([a-z0-9]+)\s+([a-z]+)\s+(-?[0-9]+)((?:\s+[0-9.]+\s+[0-9.]+\s+[0-9.]+\s+\S+){1,2})\s*"
)
_PROGRAM = re.compile(r"# Collective test starting: (\S+)")


class Half(NamedTuple):
    time_us: float
    algbw: float
    busbw: float
    wrong: str


class TableRow(NamedTuple):
    size_bytes: int
    count: int
    data_type: str
    reduction: str
    halves: tuple[Half, ...]


class Table(NamedTuple):
    program: str | None
    hosts: tuple[str, ...]  # of each rank
    rows: tuple[TableRow, ...]
    out_of_bounds: str | None
    average_busbw: float | None


def read_table(text: str) -> Table:
    rows = []
    for match in filter(None, map(_ROW.fullmatch, text.split("\n"))):
        cells = match[6].split()
        halves = tuple(
            Half(float(cells[at]), float(cells[at + 1]), float(cells[at + 2]), cells[at + 3])
            for at in range(0, len(cells), 4)
        )
        rows.append(TableRow(int(match[1]), int(match[2]), match[3], match[4], halves))
    program = _PROGRAM.search(text)
    bounds = re.search(r"# Out of bounds values : (.*\S)", text)
    average = re.search(r"# Avg bus bandwidth    : ([0-9.e+-]+)", text)
    hosts = tuple(match[1] for match in map(_RANK.match, text.split("\n")) if match)
    return Table(
        program and program[1], hosts, tuple(rows), bounds and bounds[1], float(average[1]) if average else None
    )
