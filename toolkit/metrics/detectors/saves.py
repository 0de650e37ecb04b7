"""Saves that have become slow, or that use much of the time: `slow_save`, `save_share`."""

from collections import deque
from statistics import median

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import SAVE
from toolkit.units import round_duration

__all__ = ["SaveDetector"]

_PREVIOUS = 8
_FEWEST_PREVIOUS = 3
_HOUR_S = 3600.0


class SaveDetector:
    """Judges the longest save of each block, as the slowest rank sees it, and the sum of an hour."""

    clear_after = 1

    def __init__(self) -> None:
        self._previous: deque[float] = deque(maxlen=_PREVIOUS)
        self._blocks: deque[tuple[float, float]] = deque()  # end of block, seconds spent on saves
        self._slow: list[Verdict] = []  # the verdict of the newest save, until the next one

    def observe(self, block: StepBlock) -> list[Verdict]:
        saves = [(window.metrics[SAVE], window) for window in block.windows if SAVE in window.metrics]
        longest_s = max((save.maximum for save, _ in saves), default=0.0)
        if longest_s > 0:
            self._slow = self._judge(block, longest_s)
            self._previous.append(longest_s)
        spent_s = max((save.mean * window.steps for save, window in saves), default=0.0)
        self._blocks.append((block.end_s, spent_s))
        while block.end_s - self._blocks[0][0] > _HOUR_S:
            self._blocks.popleft()
        return self._slow + self._share(block)

    def _judge(self, block: StepBlock, longest_s: float) -> list[Verdict]:
        if len(self._previous) < _FEWEST_PREVIOUS:
            return []
        usual_s = median(self._previous)
        if longest_s <= max(limit("save.seconds"), limit("save.ratio") * usual_s):
            return []
        return [
            raise_verdict(
                VerdictKind.SLOW_SAVE, Severity.INFO,
                f"a save lasted {round_duration(longest_s)} instead of {round_duration(usual_s)}",
                "check the load of the file system, or set checkpoint.background = true",
                time_s=block.end_s, steps=block.steps, evidence={"save_s": longest_s, "usual_save_s": usual_s},
            )
        ]  # fmt: skip

    def _share(self, block: StepBlock) -> list[Verdict]:
        spent_s = sum(seconds for _, seconds in self._blocks)
        if spent_s <= limit("save.share") * _HOUR_S:
            return []
        return [
            raise_verdict(
                VerdictKind.SAVE_SHARE, severity_of(spent_s / _HOUR_S),
                f"the ranks spent {round_duration(spent_s)} of the last hour on saves",
                "raise checkpoint.every_steps, or set checkpoint.background = true", cost_s_per_hour=spent_s,
                time_s=block.end_s, steps=block.steps, evidence={"save_s_per_hour": spent_s},
            )
        ]  # fmt: skip
