"""Blocks: windows of all ranks over the same interval, long enough to compare the ranks. Standard library only."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from toolkit.metrics.limits import limit
from toolkit.metrics.windows import STEP, Window, merge

__all__ = ["BlockBuilder", "StepBlock"]

_LATE_S = 30.0  # how long files of a node may arrive after those of the others, besides two of its steps
_UNEQUAL = 10  # if a rank does this multiple of the required steps, the ranks do not step together


@dataclass(frozen=True)
class StepBlock:
    """One window per rank, in the order of the ranks."""

    windows: tuple[Window, ...]

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers of the first and last step."""
        return min(window.first_step for window in self.windows), max(window.last_step for window in self.windows)

    @property
    def end_s(self) -> float:
        return max(window.began_s + window.seconds for window in self.windows)

    @property
    def seconds(self) -> float:
        return self.end_s - min(window.began_s for window in self.windows)

    @cached_property
    def by_rank(self) -> dict[int, Window]:
        return {window.rank: window for window in self.windows}

    @cached_property
    def step_s(self) -> float:
        """The time of a step: the median over ranks of their means."""
        return median(window.mean(STEP) for window in self.windows)


class BlockBuilder:
    """Merges slots into blocks in which every rank has enough steps and seconds.

    Nodes deliver their slots at different times. A slot is used once all ranks have delivered it or a later one. A rank
    that delivers nothing for `_LATE_S` and two steps is not awaited.
    """

    def __init__(self) -> None:
        self._waiting: dict[float, dict[int, Window]] = {}
        self._newest: dict[int, Window] = {}
        self._seen_s: dict[int, float] = {}  # when the newest slot of each rank arrived; clocks of nodes may differ
        self._merged: dict[int, Window] = {}
        self._used_s = float("-inf")

    def add(self, slots: Iterable[Window], now_s: float | None = None) -> list[StepBlock]:
        """Return the blocks that slots which arrived at `now_s` complete; slots that are too late are dropped.

        By default, the time is that of the newest slot.
        """
        slots = list(slots)
        now_s = max((slot.began_s for slot in slots), default=0.0) if now_s is None else now_s
        for slot in slots:
            self._seen_s[slot.rank] = now_s
            if slot.began_s > self._used_s:
                self._waiting.setdefault(slot.began_s, {})[slot.rank] = slot
            if slot.rank not in self._newest or slot.began_s > self._newest[slot.rank].began_s:
                self._newest[slot.rank] = slot
        self._forget_absent_ranks(now_s)
        oldest_s = min((slot.began_s for slot in self._newest.values()), default=self._used_s)
        blocks = []
        for began_s in sorted(self._waiting):
            if began_s > oldest_s:
                break
            self._used_s = began_s
            if block := self._use(self._waiting.pop(began_s)):
                blocks.append(block)
        return blocks

    def _forget_absent_ranks(self, now_s: float) -> None:
        for rank, slot in list(self._newest.items()):
            longest_s = slot.metrics[STEP].maximum if STEP in slot.metrics else 0.0
            if now_s - self._seen_s[rank] > _LATE_S + 2 * longest_s:
                del self._newest[rank]
                self._merged.pop(rank, None)

    def _use(self, slot: dict[int, Window]) -> StepBlock | None:
        for rank, window in slot.items():
            known = self._merged.get(rank)
            if rank in self._newest and window.steps:
                self._merged[rank] = merge((known, window)) if known and known.host == window.host else window
        steps = limit("block.steps")
        ready = [
            window
            for window in self._merged.values()
            if window.steps >= steps and window.seconds >= limit("block.seconds")
        ]
        is_unequal = any(window.steps >= _UNEQUAL * steps for window in ready)
        if not ready or (len(ready) < len(self._newest) and not is_unequal):
            return None
        self._merged.clear()
        return StepBlock(tuple(sorted(ready, key=lambda window: window.rank)))
