"""All ranks wait for data: `data_starvation`. A single rank that waits is a straggler with the cause data."""

from collections import deque
from statistics import median, median_low

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import DATA, STEP

__all__ = ["StarvationDetector"]


class StarvationDetector:
    """Judges the share of the step that the median rank waits for data."""

    clear_after = 5

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=5)

    def observe(self, block: StepBlock) -> list[Verdict]:
        shares = [window.mean(DATA) / window.mean(STEP) for window in block.windows if window.mean(STEP)]
        self._shares.append(median_low(shares) if shares else 0.0)  # of 2 ranks, the one that waits less
        if sum(share > limit("starvation.share") for share in self._shares) < limit("starvation.hits"):
            return []
        share = median(self._shares)
        return [
            raise_verdict(
                VerdictKind.STARVATION, severity_of(share), f"the ranks wait for data {100 * share:.0f} % of each step",
                "raise data.workers if a Loader reads the samples, otherwise speed up `take_samples`",
                time_s=block.end_s, steps=block.steps, evidence={"data_share": share}, cost_s_per_hour=3600 * share,
            )
        ]  # fmt: skip
