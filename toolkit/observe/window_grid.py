"""The windows of all ranks as a grid of bounded size: the mean of each metric by rank and column of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from toolkit.metrics.collector import SLOT_S
from toolkit.metrics.windows import (
    BACKWARD,
    DATA,
    DEVICE,
    EXPOSED,
    FORWARD,
    LOSS,
    OPTIMIZER,
    RSS,
    STEP,
    TOKENS,
    WORK,
    WORK_CPU,
)

__all__ = ["AT", "PACE", "WindowGrid"]

AT, PACE = "at", "pace"  # the number of the step in the middle of a window; seconds of time per step
METRICS = (AT, PACE, STEP, WORK, WORK_CPU, DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, TOKENS, LOSS, RSS, DEVICE)
COLUMNS = 240
# The records of `toolkit.metrics.window_file`.
_HEAD = [("rank", "<u4"), ("began", "<f8"), ("seconds", "<f8"), ("first", "<i8"), ("steps", "<u8"), ("metrics", "u1")]
_METRIC = np.dtype([("name", "u1"), ("mean", "<f4"), ("others", "<f4", 4)])
_HEAD_BYTES = np.dtype(_HEAD).itemsize

Array = np.ndarray[Any, Any]


class WindowGrid:
    """Sums of metrics, weighted by steps. When the columns are full, neighbours are added and columns become twice as long."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._columns = columns
        self.clear()

    def clear(self) -> None:
        self.hosts: dict[int, str] = {}  # by rank
        self.slot_s, self.began_s = float(SLOT_S), math.inf
        self._sums = np.zeros((2, len(METRICS), 0, self._columns), np.float32)  # value * steps, steps
        self._ends_s = np.zeros(0)  # of the last window of each rank

    @property
    def columns(self) -> int:
        """The number of columns up to the newest window."""
        return int(np.flatnonzero(self._sums[1, 0].any(axis=0)).max(initial=-1)) + 1

    @property
    def times(self) -> list[float]:
        """The start of each column in seconds since the epoch."""
        return [self.began_s + self.slot_s * column for column in range(self.columns)]

    def means(self, name: str) -> Array:
        """Return the means of a metric by rank and column; NaN if there is none."""
        total, steps = self._sums[:, METRICS.index(name), :, : self.columns]
        return np.divide(total, steps, out=np.full(total.shape, np.nan, np.float32), where=steps > 0)

    def add(self, windows: Iterable[bytes], names: Sequence[str], host: str) -> None:
        """Add the packed windows of one node; skip those that end before the last one of their rank."""
        by_size: dict[int, list[bytes]] = {}
        for window in windows:
            by_size.setdefault(len(window), []).append(window)
        ends_s = self._ends_s.copy()
        for size, same in by_size.items():
            form = np.dtype([*_HEAD, ("of", _METRIC, ((size - _HEAD_BYTES) // _METRIC.itemsize,))])
            rows = np.frombuffer(b"".join(same), form)
            known_s = np.zeros(max(len(ends_s), int(rows["rank"].max()) + 1))
            known_s[: len(ends_s)] = ends_s
            rows = rows[rows["began"] >= known_s[rows["rank"]]]
            if len(rows):
                self.hosts |= dict.fromkeys(np.unique(rows["rank"]).tolist(), host)
                self._add(rows, names)

    def _add(self, rows: Array, names: Sequence[str]) -> None:
        ranks, ends_s = rows["rank"].astype(np.intp), rows["began"] + rows["seconds"]
        self._fit(int(ranks.max()) + 1, float(rows["began"].min()), float(ends_s.max()))
        np.maximum.at(self._ends_s, ranks, ends_s)
        column = ((rows["began"] - self.began_s) // self.slot_s).astype(np.intp).clip(0, self._columns - 1)
        covered = np.maximum(1, np.rint(rows["seconds"] / self.slot_s)).astype(np.intp)  # a merged window has several
        steps = rows["steps"] / covered
        values = {AT: rows["first"] + rows["steps"] / 2, PACE: rows["seconds"] / np.maximum(1, rows["steps"])}
        for number, name in enumerate(METRICS):
            has, value = np.ones(len(rows), bool), values.get(name)
            if value is None:
                if name not in names:
                    continue
                cells = rows["of"]["name"] == names.index(name)
                has, value = cells.any(axis=1), rows["of"]["mean"][cells]
            for more in range(int(covered.max())):
                chosen = has & (covered > more) & (column + more < self._columns)
                at = (ranks[chosen], column[chosen] + more)
                np.add.at(self._sums[0, number], at, (value[chosen[has]] * steps[chosen]).astype(np.float32))
                np.add.at(self._sums[1, number], at, steps[chosen].astype(np.float32))

    def _fit(self, ranks: int, first_s: float, end_s: float) -> None:
        """Make the grid large enough for ranks and times."""
        if math.isinf(self.began_s):
            self.began_s = first_s // SLOT_S * SLOT_S
        if (more := ranks - self._sums.shape[2]) > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, more), (0, 0)))
            self._ends_s = np.pad(self._ends_s, (0, more))
        while end_s - self.began_s > self.slot_s * self._columns:
            pairs = self._sums.reshape(*self._sums.shape[:3], -1, 2).sum(axis=4)
            self._sums = np.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, self._columns - pairs.shape[3])))
            self.slot_s *= 2
