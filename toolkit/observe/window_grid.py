"""The windows of all ranks in bounded memory: the mean of each metric by rank and column of time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from toolkit.metrics import windows
from toolkit.metrics.collector import SLOT_S

__all__ = ["AT", "COLUMNS", "PACE", "Array", "WindowGrid"]

Array = np.ndarray[Any, Any]
AT, PACE = "at", "pace"  # the number of the step in the middle of a window; seconds of time per step
METRICS = (
    AT, PACE, windows.STEP, windows.WORK, windows.WORK_CPU, windows.DATA, windows.FORWARD, windows.BACKWARD,
    windows.EXPOSED, windows.BUBBLE, windows.OPTIMIZER, windows.TOKENS, windows.RSS, windows.DEVICE,
)  # fmt: skip
COLUMNS = 240
# The records of `toolkit.metrics.window_file`.
_HEAD = [
    ("rank", "<u4"),
    ("began", "<f8"),
    ("seconds", "<f8"),
    ("first", "<i8"),
    ("last", "<i8"),
    ("steps", "<u8"),
    ("metrics", "u1"),
]
_METRIC = np.dtype([("name", "u1"), ("mean", "<f4"), ("others", "<f4", 4)])


class WindowGrid:
    """Sums weighted by steps. When all columns are in use, pairs of them are added, and each covers twice the time."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.hosts: dict[int, str] = {}  # by rank
        self.slot_s, self.began_s = float(SLOT_S), math.inf
        self._sums = np.zeros((2, len(METRICS), 0, COLUMNS), np.float32)  # value * steps, steps
        self._ends_s = np.zeros(0)  # of the last window of each rank

    @property
    def times(self) -> list[float]:
        """The start of each column up to the newest window, in seconds since the epoch."""
        count = int(np.flatnonzero(self._sums[1, 0].any(axis=0)).max(initial=-1)) + 1
        return [self.began_s + self.slot_s * column for column in range(count)]

    def means(self, name: str) -> Array:
        """Return the means of a metric by rank and column; NaN if there is none."""
        total, steps = self._sums[:, METRICS.index(name), : max(self.hosts, default=-1) + 1, : len(self.times)]
        return np.divide(total, steps, out=np.full(total.shape, np.nan), where=steps > 0)

    def add(self, packed: Iterable[bytes], names: Sequence[str], host: str) -> None:
        """Add the windows of one node; skip those that began before the end of the last known one of their rank."""
        by_size: dict[int, list[bytes]] = defaultdict(list)
        for window in packed:
            by_size[len(window)].append(window)
        parts = []
        for size, same in by_size.items():
            count = (size - np.dtype(_HEAD).itemsize) // _METRIC.itemsize
            parts.append(np.frombuffer(b"".join(same), np.dtype([*_HEAD, ("of", _METRIC, (count,))])))
            self._fit(parts[-1])
        for part in [part[part["began"] >= self._ends_s[part["rank"]]] for part in parts]:
            if len(part):
                self.hosts |= dict.fromkeys(np.unique(part["rank"]).tolist(), host)
                np.maximum.at(self._ends_s, part["rank"], part["began"] + part["seconds"])
                self._add(part, names)

    def _add(self, rows: Array, names: Sequence[str]) -> None:
        column = ((rows["began"] - self.began_s) // self.slot_s).clip(0, COLUMNS - 1)
        cell, steps = (rows["rank"] * float(COLUMNS) + column).astype(int), rows["steps"].astype(np.float32)
        own = {AT: (rows["first"] + rows["last"]) / 2, PACE: rows["seconds"] / np.maximum(1, rows["steps"])}
        for number, name in enumerate(METRICS):
            cells = rows["of"]["name"] == (names.index(name) if name in names else -1)
            has = np.full(len(rows), True) if name in own else cells.any(axis=1)
            value = own[name] if name in own else rows["of"]["mean"][cells]
            # `add.at` is fast only with one index and one type.
            np.add.at(self._sums[0, number].reshape(-1), cell[has], value.astype(np.float32) * steps[has])
            np.add.at(self._sums[1, number].reshape(-1), cell[has], steps[has])

    def _fit(self, rows: Array) -> None:
        """Make the grid large enough for the ranks and times of windows, and its columns not shorter than a window."""
        if math.isinf(self.began_s):
            self.began_s = float(rows["began"].min())
        if (more := (1 << int(rows["rank"].max()).bit_length()) - len(self._ends_s)) > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, more), (0, 0)))
            self._ends_s = np.pad(self._ends_s, (0, more))
        end_s, longest_s = (rows["began"] + rows["seconds"]).max(), rows["seconds"].max()
        while end_s - self.began_s > self.slot_s * COLUMNS or longest_s > self.slot_s:
            self._sums = self._sums[..., ::2] + self._sums[..., 1::2]
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, 0), (0, COLUMNS - self._sums.shape[3])))
            self.slot_s *= 2
