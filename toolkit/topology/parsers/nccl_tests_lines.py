"""The lines of nccl-tests, one by one: settings, ranks, rows of results, summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from toolkit.topology.parsers.host_lines import Line
from toolkit.topology.parsers.nccl_tests_rows import ResultRow, row_of

_RANK = re.compile(
    r"#\s+Rank\s+([0-9]{1,7})(?: Group\s+[0-9]+)? Pid\s+[0-9]{1,9} on\s+(\S+) device\s+([0-9]{1,3}) \[[0-9a-fA-Fx:.]+\] \S.*"
)
_NAMED = re.compile(r"# Collective test (starting|concluded): (\w+)")
_SETTINGS = re.compile(
    r"# nThread ([0-9]+) nGpus ([0-9]+) minBytes ([0-9]+) maxBytes ([0-9]+) step: ([0-9]+)\((factor|bytes)\) .*\S"
)
_TITLES = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "error")
_BOUNDS = re.compile(r"# Out of bounds values : ([0-9]{1,12} (?:OK|FAILED))")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s+: ([0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?)")
_TIMES = ("time", "algbw", "busbw")
_USUAL = ("size", "count", "type", "redop", "root", *_TIMES, "#wrong", *_TIMES, "#wrong")


class RunReader:
    """What was read so far; lines are given to it in their order."""

    def __init__(self, warnings: list[str]) -> None:
        self.warnings = warnings
        self.rows: list[tuple[int, ResultRow | None]] = []
        self.ranks: dict[int, tuple[int, str]] = {}
        self.headers = 0
        self.named: str | None = None
        self.average: float | None = None
        self.out_of_bounds: str | None = None
        self._titles: tuple[str, ...] = ()
        self._settings: tuple[int, int, int, str] | None = None
        self._once: dict[str, int] = {}
        self._damaged_ranks = False
        self._before = ""
        self._devices: set[tuple[str, str]] = set()

    def read(self, line: Line) -> None:
        """Take one line in; what the program or NCCL prints beside the table is passed over."""
        text = line.text.strip()
        if re.match(r"[0-9]+\s", text) and not text.startswith("#"):
            self._row(line, text.split())
        elif text.startswith("#"):
            self._comment(line, text)
        elif re.match(r"[-+.0-9]|\w+ +[0-9]+ +[a-z0-9]+ +\w+ +-?[0-9]+ +[0-9.]+", text):
            self.rows.append((line.number, None))
            self._name(line, "not a row of results")

    def _comment(self, line: Line, text: str) -> None:
        if text != "#" and (text == self._before or re.search(r"^##|[^ #]#$", text)):
            self._name(line, "the same as the line before, or two lines in one")
        self._before = text
        if match := _RANK.fullmatch(text):
            self._rank(line, int(match[1]), match[2], match[3])
        elif match := _NAMED.fullmatch(text):
            self._one(line, match[1])
            if self.named not in (None, match[2]):
                self._name(line, f"the program was {self.named} before")
            self.named = match[2] if self.named in (None, match[2]) else "?"
        elif match := _SETTINGS.fullmatch(text):
            self._one(line, "settings")
            self._settings = (int(match[3]), int(match[4]), int(match[5]), match[6])
        elif text.lstrip("# ").startswith("size") or text.split()[1:3] == ["count", "type"]:
            self._header(line, text)
        elif match := _BOUNDS.fullmatch(text):
            self._one(line, "values out of bounds")
            self.out_of_bounds = match[1]
        elif match := _AVERAGE.fullmatch(text):
            self._one(line, "average")
            self.average = float(match[1])
        elif re.search(r"Rank|Pid|device +[0-9]|bounds|bandwidth|Bytes|Collective|algbw", text):
            self._damaged_ranks |= bool(re.search(r"Rank|Pid|device ", text))
            self._name(line, "not a line of nccl-tests")

    def _one(self, line: Line, what: str) -> None:
        if what in self._once:
            self._name(line, f"{what} stand in line {self._once[what]}, too")
        self._once[what] = line.number

    def _rank(self, line: Line, rank: int, host: str, device: str) -> None:
        if (host, device) in self._devices:
            self._name(line, f"device {device} of {host!r} has another rank, too")
            self._damaged_ranks = True
        self._devices.add((host, device))
        if rank != len(self.ranks) or rank in self.ranks:
            self._name(line, f"rank {rank} where {len(self.ranks)} belongs")
            self._damaged_ranks = True
        self.ranks[rank] = (line.number, host)

    def _header(self, line: Line, text: str) -> None:
        titles = tuple(text.lstrip("# ").split())
        self.headers += 1
        self._one(line, "titles")
        if (
            titles[:3] != _USUAL[:3]
            or set(titles) - set(_TITLES)
            or {titles.count(name) for name in _TIMES} not in ({1}, {2})
        ):
            self._name(line, "not the titles of the table")
            return
        self._titles = titles

    def _row(self, line: Line, cells: Sequence[str]) -> None:
        titles = self._titles or _USUAL
        row = row_of(len(self.rows), line.number, cells, titles) if len(cells) == len(titles) else None
        if row is None:
            self._name(line, f"not {len(titles)} cells of results that agree")
        self.rows.append((line.number, row))

    def _name(self, line: Line, what: str) -> None:
        self.warnings.append(f"line {line.number}: {what}: {line.text.strip()[:80]!r}")

    def rank_count(self) -> int | None:
        """How many ranks are listed; None where a line of them is damaged."""
        return len(self.ranks) if self.ranks and not self._damaged_ranks else None

    def compare(self, last: int) -> None:
        """Name what is not there, and rows whose sizes do not follow one another."""
        for what in ("titles", "average", "settings"):
            if what not in self._once:
                self.warnings.append(f"line {last}: no line of the {what}")
        if "values out of bounds" not in self._once and "average" in self._once and "settings" in self._once:
            self.warnings.append(f"line {last}: no line of the values out of bounds")
        if ("starting" in self._once) != ("concluded" in self._once):
            self.warnings.append(f"line {last}: the test is not said to start and to be concluded")
        sizes = [(number, row.size_bytes) for number, row in self.rows if row]
        if not self.rows:
            self.warnings.append(f"line {last}: no row of results")
        whole = len(sizes) == len(self.rows) and sizes
        if whole and self._settings:
            expected = _sizes(*self._settings, limit=len(sizes) + 1)
            if [size for _, size in sizes] != expected[: len(sizes)] or len(sizes) != len(expected):
                self.warnings.append(
                    f"line {sizes[-1][0]}: rows of other sizes than the settings say: {self._settings}"
                )
        elif any(low >= high for (_, low), (_, high) in pairwise(sizes)):
            self.warnings.append(f"line {sizes[-1][0]}: the sizes of the rows do not ascend")
        steps = {high // low for (_, low), (_, high) in pairwise(sizes) if low}
        if len(steps) > 1 and not self._settings:
            self.warnings.append(f"line {sizes[-1][0]}: the sizes of the rows do not grow by one factor")
        if self.average is not None and whole:
            halves = [half for _, row in self.rows if row for half in (row.out_of_place, row.in_place) if half]
            values = [half.bus_gb_per_s for half in halves if half.bus_gb_per_s is not None]
            mean = sum(values) / max(1, len(values))
            if abs(mean - self.average) > 0.005 + 1e-4 * self.average:
                self.warnings.append(
                    f"line {self._once['average']}: the average is {self.average}, that of the rows {mean:.4f}"
                )

    def compare_bandwidths(self, factor: float | None, *, whole: bool) -> bool:
        """Whether collective and number of ranks fit the rows; a few rows that do not fit are not read.

        `whole`: of this collective the count of elements is that of all data, not of a rank's part.
        """
        odd = {place: row for place, (_, row) in enumerate(self.rows) if row and factor and not row.has_ratio(factor)}
        if len(odd) > 1 and len(odd) * 2 > len(self.rows):
            number = self.rows[-1][0]
            self.warnings.append(f"line {number}: the bandwidths are of another number of ranks or another collective")
            return False
        odd |= {place: row for place, (_, row) in enumerate(self.rows) if row and whole and row.count != row.elements}
        ratio = "unknown" if factor is None else f"{factor:.5f}"
        for place, row in odd.items():
            self.warnings.append(
                f"line {row.line}: bandwidths whose ratio is not {ratio}, or another count of elements; "
                "nothing is read from it"
            )
            self.rows[place] = (row.line, None)
        return True


def _sizes(first: int, most: int, step: int, kind: str, *, limit: int) -> list[int]:
    sizes: list[int] = []
    size = first
    while size <= most and len(sizes) < limit:
        sizes.append(size)
        larger = size * step if kind == "factor" else size + step
        if larger <= size:
            break
        size = larger
    return sizes
