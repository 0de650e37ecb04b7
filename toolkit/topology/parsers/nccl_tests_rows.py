"""One row of results of nccl-tests, and whether its numbers agree with one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

DATA_BYTES = {
    "int8": 1, "uint8": 1, "char": 1, "int32": 4, "int": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float16": 2,
    "float": 4, "float32": 4, "double": 8, "float64": 8, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "f8e4m3": 1, "f8e5m2": 1,
}  # fmt: skip
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,3})?|inf|nan", re.ASCII)
_TIMES = ("time", "algbw", "busbw")
_UNIT = 1e3  # bytes a microsecond in a GB/s


@dataclass(frozen=True)
class Half:
    """One half of a row, out of place or in place; `wrong` is as printed, "N/A" where it was not checked."""

    time_us: float | None
    gb_per_s: float | None
    bus_gb_per_s: float | None
    wrong: str | None


@dataclass(frozen=True)
class ResultRow:
    """One row. `place` is its number among all rows, from 0; `root` None where there is no such column."""

    place: int
    line: int
    size_bytes: int
    count: int
    data_type: str
    operation: str | None
    root: int | None
    out_of_place: Half | None
    in_place: Half | None

    @property
    def elements(self) -> int:
        """How many elements there are in all data."""
        return self.size_bytes // DATA_BYTES[self.data_type]

    def has_ratio(self, factor: float) -> bool:
        """Whether bus bandwidth is so many times the bandwidth, as far as two decimals tell."""
        halves = [half for half in (self.out_of_place, self.in_place) if half]
        return all(
            half.gb_per_s is None
            or half.bus_gb_per_s is None
            or abs(half.bus_gb_per_s - factor * half.gb_per_s) <= 0.0051 * (1 + factor)
            for half in halves
        )


def row_of(place: int, line: int, cells: Sequence[str], titles: Sequence[str]) -> ResultRow | None:
    """A row whose numbers agree with one another; None for any other."""
    single = {
        title: cell for title, cell in zip(titles, cells, strict=True) if titles.count(title) == 1 or title == "size"
    }
    root = single.get("root", "-1")
    if not (cells[0].isdecimal() and cells[1].isdecimal() and re.fullmatch(r"-1|[0-9]{1,7}", root)):
        return None
    if len(cells[0]) > 18 or cells[2] not in DATA_BYTES or not re.fullmatch("[a-z]+", single.get("redop", "none")):
        return None
    size, count = int(cells[0]), int(cells[1])
    begins = [number for number, title in enumerate(titles) if title == "time"]
    halves = [_half(cells[begin:], titles[begin:], size) for begin in begins]
    elements = size // DATA_BYTES[cells[2]]
    if (
        None in halves
        or count > elements
        or (count and abs(round(elements / count) * count - elements) >= 16 * round(elements / count))
    ):
        return None
    return ResultRow(
        place=place,
        line=line,
        size_bytes=size,
        count=count,
        data_type=cells[2],
        operation=single.get("redop"),
        root=int(root) if "root" in single else None,
        out_of_place=halves[0],
        in_place=halves[1] if len(halves) > 1 else None,
    )


def _half(cells: Sequence[str], titles: Sequence[str], size: int) -> Half | None:
    if tuple(titles[:3]) != _TIMES or not all(_NUMBER.fullmatch(cell) for cell in cells[:3]):
        return None
    time, bandwidth, bus = (float(cell) for cell in cells[:3])
    wrong = cells[3] if len(cells) > 3 and titles[3] in ("#wrong", "error") else None
    if wrong is not None and not re.fullmatch(r"N/A|[0-9]{1,15}|[0-9](\.[0-9]+)?e[+-][0-9]+", wrong):
        return None
    decimals = len(cells[0].partition(".")[2])
    most = size / max(1e-9, time - 0.51 * 10**-decimals) / _UNIT + 0.0051
    least = size / (time + 0.51 * 10**-decimals) / _UNIT - 0.0051
    return Half(time, bandwidth, bus, wrong) if least <= bandwidth <= most and bus <= 2 * bandwidth + 0.011 else None
