"""Cut the steps in the rings of a node into windows of 10 s, which are the same slots of time on all nodes. Standard library only."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.ring import RingReader, Steps
from toolkit.metrics.windows import LOSS, NOT_FINITE_AFTER, Statistics, Window, statistics_of
from toolkit.terminal.talk import say_beside

__all__ = ["SLOT_S", "Collector", "window_of"]

SLOT_S = 10
GRACE_S = 1.0  # steps whose phases a GPU reports late still get into their slot


@dataclass
class _Open:
    """The steps of a rank whose slot is not over; the records of `parts` have the columns of the last part."""

    slot: int = 0
    parts: list[Steps] = field(default_factory=list)


@dataclass
class Collector:
    """Turns new steps into windows. It reads no clock and writes no file. `own` gets the steps of rank 0."""

    host: str
    own: Callable[[Steps], None] | None = None
    _open: dict[int, _Open] = field(default_factory=dict)
    _damaged: set[Path] = field(default_factory=set)

    def collect(self, rings: Iterable[RingReader], now: float) -> list[Window]:
        """Read the new steps of all rings; return the windows of slots that are over at `now`, with `inf` of all slots.

        A damaged ring is reported once.
        """
        found: list[Window] = []
        for ring in rings:
            if ring.path not in self._damaged:
                try:
                    found += self.add(ring.rank, ring.new(), now)
                except ToolkitError as error:
                    self._damaged.add(ring.path)
                    say_beside(str(error))
        return found

    def add(self, rank: int, steps: Steps, now: float) -> list[Window]:
        """Add steps of a rank; return the windows of its slots that are over."""
        own = self._open.setdefault(rank, _Open())
        if steps:
            own.parts.append(steps)
            if rank == 0 and self.own is not None:
                self.own(steps)
        found: list[Window] = []
        while own.parts and (window := self._cut(rank, own, now)):
            found.append(window)
        return found

    def _cut(self, rank: int, own: _Open, now: float) -> Window | None:
        """Return the window of the first open slot if it is over, and keep the steps after it."""
        slot = max(own.slot, int(own.parts[0].ended_s()[0] // SLOT_S))
        end_s = (slot + 1) * SLOT_S
        if now < end_s + GRACE_S:
            return None
        steps = Steps(b"".join(part.data for part in own.parts), own.parts[-1].names)
        # A clock that was set back leaves steps of earlier slots in this one.
        count = max(1, bisect_left(steps.ended_s(), end_s))
        rest = steps.cut(count, len(steps))
        own.slot, own.parts = slot + 1, [rest] if rest else []
        return window_of(steps.cut(0, count), rank, self.host, slot * SLOT_S, SLOT_S)


def window_of(steps: Steps, rank: int, host: str, began_s: float, seconds: float) -> Window:
    """Return the statistics of at least one step."""
    metrics = {name: _statistics(values) for name in steps.names if (values := steps.values(name))}
    numbers = steps.numbers()
    if LOSS in metrics and not math.isfinite(metrics[LOSS].mean) and (bad := steps.first_not_finite(LOSS)) is not None:
        metrics[NOT_FINITE_AFTER] = statistics_of([float(bad - numbers[0])])
    return Window(rank, host, began_s, seconds, numbers[0], numbers[-1], len(steps), metrics)


def _statistics(values: list[float]) -> Statistics:
    """Return the statistics of values; if one of them is NaN, the mean is NaN and the rest that of the others."""
    known = [value for value in values if not math.isnan(value)]
    found = statistics_of(known or [math.nan])
    return found if len(known) == len(values) else replace(found, mean=math.nan)
