"""Steps that have become slower than the best ones of this attempt: `throughput_drop`."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import STEP

__all__ = ["ThroughputDetector"]

_DIFFERENCES = 100  # of consecutive blocks, from which the spread is estimated


class ThroughputDetector:
    """A CUSUM of the logarithms of block medians against the best blocks in a row."""

    clear_after = 5

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=int(limit("throughput.reference")))
        self._differences: deque[float] = deque(maxlen=_DIFFERENCES)
        self._best = math.inf
        self._sum = 0.0
        self._rising = 0  # blocks since the sum was 0

    def observe(self, block: StepBlock) -> list[Verdict]:
        steps_s = [window.metrics[STEP].median for window in block.windows if STEP in window.metrics]
        if not steps_s:
            return []
        value = math.log(max(1e-9, median(steps_s)))
        if self._recent:
            self._differences.append(value - self._recent[-1])
        self._recent.append(value)
        if len(self._recent) < limit("throughput.reference"):
            return []
        self._best = min(self._best, median(self._recent))
        spread = _spread(self._differences)
        slack = max(limit("throughput.slack"), limit("throughput.slack_spreads") * spread)
        alarm = max(limit("throughput.alarm"), limit("throughput.alarm_spreads") * spread)
        # A single block, which a neighbour may disturb, adds less than the alarm. The cap of the sum lets it return to 0
        # soon after the throughput does.
        rise = min(value - self._best - slack, limit("throughput.block") * alarm)
        self._sum = min(2 * alarm, max(0.0, self._sum + rise))
        self._rising = min(self._rising + 1, len(self._recent)) if self._sum else 0
        if self._sum <= alarm:
            return []
        now = median(list(self._recent)[-self._rising :])
        if now <= self._best + slack:  # the drop is over, and the sum not yet back at 0
            return []
        return [_drop(block, usual_s=math.exp(self._best), now_s=math.exp(now))]


def _spread(differences: Iterable[float]) -> float:
    """Return the standard deviation of blocks, from the 95th percentile of differences: 1 in 20 may be an outlier."""
    ordered = sorted(map(abs, differences))
    return ordered[round(0.95 * (len(ordered) - 1))] / (1.96 * math.sqrt(2))


def _drop(block: StepBlock, *, usual_s: float, now_s: float) -> Verdict:
    lost = max(0.0, 1 - usual_s / now_s)
    return raise_verdict(
        VerdictKind.THROUGHPUT, severity_of(lost),
        f"steps last {1e3 * now_s:.4g} ms instead of {1e3 * usual_s:.4g} ms earlier in this attempt",
        "check the verdicts of ranks and nodes; compare the phases before and after with `toolkit report`",
        time_s=block.end_s, steps=block.steps, evidence={"step_s": now_s, "best_step_s": usual_s},
        cost_s_per_hour=3600 * lost,
    )  # fmt: skip
