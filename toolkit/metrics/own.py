"""Metrics of a program whose loop is not toolkit's, at most a line a second in `metrics/own.jsonl`. Standard library only.

The guard of rank 0's node writes the values of rank 0. The supervisor writes the means over ranks of metrics that
`observe.metrics` declares as `NAME:mean` into `metrics/means.jsonl`, in the same form, for every window of 10 s.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import c_float
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from toolkit.metrics.records import RecordLog, RecordTail, last_of, read_records, records_from_end
from toolkit.metrics.ring import Steps
from toolkit.metrics.windows import COLUMNS, GRAD_NORM, LOSS, TOKENS, Window
from toolkit.rundir.files import utc_of

__all__ = ["FILES", "MeanLog", "OwnLog", "OwnRecord", "OwnTail", "as_number", "last_own", "read_own"]

MOST_POINTS = 8192  # of a metric on a page that follows a run
FILES = OWN, MEANS = "own.jsonl", "means.jsonl"
_ALSO = (LOSS, GRAD_NORM, TOKENS)  # names in every ring that a program may record, besides names of its own


@dataclass(frozen=True)
class OwnRecord:
    """The newest values at one time. The fields are the columns of the file, in this order.

    first: the first step since the previous line; it replaces all earlier values of this and later steps.
    step: the newest step.
    time: when that step ended, UTC, ISO 8601.
    attempt: the attempt of this step.
    values: the newest value of each metric; {"$float": "nan"}, "inf" or "-inf" in the file if not finite.
    at: the step of each value that is older than `step`.
    """

    first: int
    step: int
    time: str
    attempt: int
    values: dict[str, float]
    at: dict[str, int] = field(default_factory=dict)

    def to_line(self) -> str:
        values = {name: as_number(value) for name, value in self.values.items()}
        return json.dumps(asdict(self) | {"values": values}, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> OwnRecord:
        row = json.loads(line)
        for name, kind in (("first", int), ("step", int), ("attempt", int), ("time", str), ("values", dict)):
            if type(row[name]) is not kind:
                raise ValueError(f"expected {name} to be {kind.__name__}, got {row[name]!r}")
        found = ((name, one["$float"] if isinstance(one, dict) else one) for name, one in row["values"].items())
        # As strings, since an integer may be too large.
        row["values"] = {name: float(str(one)) for name, one in found}
        row["at"] = {name: operator.index(step) for name, step in dict(row["at"]).items()}
        return cls(**row)

    def step_of(self, name: str) -> int:
        return self.at.get(name, self.step)


class Point(NamedTuple):
    """The value of a metric after a step."""

    step: int
    value: float
    time: str
    attempt: int


def as_number(value: float) -> float | dict[str, str]:
    """Return a number as JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else {"$float": repr(value)}


def _short(value: float) -> float:
    """Return the decimal with the fewest digits, at most 9, that is the same 32-bit float: 2.31, not 2.309999942779541."""
    shorter = (float(f"{value:.{digits}g}") for digits in (6, 7, 8))
    return next((one for one in shorter if c_float(one).value == c_float(value).value), float(f"{value:.9g}"))


class OwnLog:
    """Writes the newest values of rank 0, except metrics in `without`.

    If toolkit's loop writes `train.jsonl`, only names of the program itself count.
    """

    def __init__(self, folder: Path, attempt: int, without: Collection[str] = (), *, file: str = OWN) -> None:
        self._folder, self._attempt, self._without, self._file = folder, attempt, without, file
        self._log: RecordLog[OwnRecord] | None = None
        self._newest: dict[str, tuple[int, float]] | None = None  # by name: step and value
        self._line: tuple[int, int, float] | None = None  # first step, step and time of the next line
        self._step = -1  # of the last line

    def add(self, steps: Steps) -> None:
        """Take new steps of rank 0; reads the file of earlier attempts at the first ones."""
        names = [one for one in steps.names if one not in self._without and (one not in COLUMNS or one in _ALSO)]
        numbers, found = steps.numbers(), {name: one for name in names if (one := steps.newest(name)) is not None}
        self._note(min(numbers), numbers[-1], steps.ended_s()[-1], found)

    def _note(self, first: int, step: int, time_s: float, found: Mapping[str, tuple[int, float]]) -> None:
        if self._newest is None:
            self._newest = self._newest_before(first)
        if first != self._step:  # a program may record further values of its last step
            self._newest = {name: one for name, one in self._newest.items() if one[0] < first}
        self._newest |= found
        self._line = min(first, self._line[0] if self._line else first), step, time_s
        self._step = step

    def _newest_before(self, first: int) -> dict[str, tuple[int, float]]:
        """Return the values of earlier attempts up to the step at which this one continues."""
        found: dict[str, tuple[int, float]] = {}
        for record in records_from_end(self._folder / self._file, OwnRecord.from_line):
            for name, value in record.values.items():
                if (step := record.step_of(name)) < first:
                    found.setdefault(name, (step, value))
            if record.step < first or first <= 0:  # this line has all metrics, or no step is earlier
                break
            first = min(first, record.first)  # the line replaces earlier values of later steps
        return found

    def flush(self) -> None:
        """Write a line if there are new steps."""
        if self._line is None or self._newest is None:
            return
        newest, (first, step, time_s) = self._newest, self._line
        if (self._folder / "train.jsonl").exists():
            newest = {name: one for name, one in newest.items() if name not in COLUMNS}
            if not newest:
                return
        self._log, self._line = self._log or RecordLog(self._folder / self._file), None
        values = {name: _short(value) for name, (_, value) in newest.items()}
        at = {name: number for name, (number, _) in newest.items() if number != step}
        self._log.write(OwnRecord(first, step, utc_of(time_s), self._attempt, values, at))

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self._log is not None:
            self._log.close()


class MeanLog(OwnLog):
    """Writes the means over ranks of declared metrics, of the newest window of each rank that has the metric."""

    def __init__(self, folder: Path, attempt: int, declared: Mapping[str, bool]) -> None:
        super().__init__(folder, attempt, file=MEANS)
        self._means: dict[str, dict[int, float]] = {name: {} for name, is_mean in declared.items() if is_mean}
        self._began_s = -math.inf  # of the newest windows
        self._changed: set[str] = set()  # the metrics that the next line has

    def add_windows(self, windows: Iterable[Window]) -> None:
        """Take new windows, in any order, and write a line for each interval in which a rank has a declared metric."""
        known = [one for one in windows if self._means.keys() & one.metrics.keys()]
        for began_s in sorted({one.began_s for one in known}):
            alike = [one for one in known if one.began_s == began_s]
            for name, means in self._means.items():
                new = {one.rank: one.metrics[name].mean for one in alike if name in one.metrics}
                means |= new
                if new:
                    self._changed.add(name)
            if began_s < self._began_s:  # of a late rank, whose values count in the next line
                continue
            step = max(one.last_step for one in alike)
            step, self._began_s = max(step, self._step) if began_s == self._began_s else step, began_s
            found = {one: (step, sum(self._means[one].values()) / len(self._means[one])) for one in self._changed}
            self._changed.clear()
            # Windows of other nodes may be late, so only the first ones show that the attempt repeats steps.
            first = min(one.first_step for one in alike) if self._step < 0 else step
            self._note(first, step, began_s + alike[0].seconds, found)
            self.flush()


class OwnTail:
    """The values of a run by metric, at most about `MOST_POINTS`, in the order of their steps; each `update` reads only what is new."""

    def __init__(self, folder: Path, names: Sequence[str] = FILES) -> None:
        self._tails = [(RecordTail(folder / name, OwnRecord.from_line), dict[str, list[Point]]()) for name in names]

    @property
    def points(self) -> dict[str, list[Point]]:
        return {name: points for _, found in self._tails for name, points in found.items() if points}

    def update(self) -> None:
        for tail, found in self._tails:
            while records := tail.new():
                for record in records:
                    _fold(found, record)
                for name, points in found.items():
                    if len(points) > MOST_POINTS:
                        found[name] = _thinned(points)


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most half of `MOST_POINTS` points with about equal distances in steps, and the newest one."""
    least = (points[-1].step - points[0].step) / (MOST_POINTS // 2 - 1)
    kept = [points[-1]]
    for one in reversed(points):
        if kept[-1].step - one.step >= least:
            kept.append(one)
    return kept[::-1]


def _fold(points: dict[str, list[Point]], record: OwnRecord) -> None:
    """Add the values of a line, which replace those of the same and later steps."""
    for known in points.values():
        while known and known[-1].step >= record.first:
            known.pop()
    for name, value in record.values.items():
        known, step = points.setdefault(name, []), record.step_of(name)
        if not known or known[-1].step < step:
            known.append(Point(step, value, record.time, record.attempt))


def read_own(folder: Path) -> dict[str, list[Point]]:
    """Return all values of the metrics that the program of a run recorded, by name. Raises the errors of `read_records`."""
    found: dict[str, list[Point]] = {}
    for path in (folder / name for name in FILES):
        points: dict[str, list[Point]] = {}
        for record in read_records(path, OwnRecord.from_line, what="metric") if path.exists() else ():
            _fold(points, record)
        found |= points
    return {name: points for name, points in found.items() if points}


def last_own(folder: Path) -> OwnRecord | None:
    """Return the newest values, with those of `means.jsonl`; None if there are none."""
    last, means = (last_of(folder / name, OwnRecord.from_line) for name in FILES)
    if last is None or means is None:
        return last or means
    at = last.at | {name: means.step_of(name) for name in means.values}
    return replace(last, values=last.values | means.values, at=at)
