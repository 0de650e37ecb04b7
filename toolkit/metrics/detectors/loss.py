"""A loss that is not finite, that jumps, or that does not return: `loss_not_finite`, `loss_spike`, `divergence`."""

import math
from bisect import bisect_left, insort
from collections import deque
from statistics import median

from toolkit.metrics.limits import limit
from toolkit.metrics.robust import mad
from toolkit.metrics.samples import LossSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict

__all__ = ["LossDetector"]

_HISTORY = int(limit("loss.history"))


class LossDetector:
    """Compares each loss with the median of the previous ones; high losses do not enter that history."""

    clear_after = 6

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self._high: deque[float] = deque(maxlen=_HISTORY)  # the losses since a row of spikes began
        self._row = 0  # consecutive spikes
        self._since = 0  # losses since the row, 0 if there is none
        self._diverges = False
        self._not_finite: Verdict | None = None  # of the first rank and step
        self._rank: int | None = None

    def observe(self, sample: LossSample) -> list[Verdict]:
        """Return the faults of one loss."""
        if not math.isfinite(sample.loss):
            self._not_finite = self._not_finite or _verdict(VerdictKind.LOSS_NOT_FINITE, sample, math.nan)
            return [self._not_finite]
        self._rank = sample.rank if self._rank is None else min(self._rank, sample.rank)
        if sample.rank != self._rank:
            return []
        self._not_finite = None
        usual = median(self._sorted) if self._sorted else sample.loss
        floor = usual + limit("loss.excess") * abs(usual)
        is_spike = len(self._sorted) >= limit("loss.fewest") and sample.loss > max(
            floor, usual + limit("loss.mads") * mad(self._sorted, usual)
        )
        self._row = self._row + 1 if is_spike else 0
        if self._since or self._row >= limit("loss.row"):
            self._follow(sample.loss, floor)
        if not is_spike and not self._since:
            self._remember(sample.loss)
        if self._diverges:
            return [_verdict(VerdictKind.DIVERGENCE, sample, usual)]
        return [_verdict(VerdictKind.LOSS_SPIKE, sample, usual)] if is_spike else []

    def _follow(self, loss: float, floor: float) -> None:
        """Decide after a full history of losses whether the loss diverged, and again until it returns."""
        self._since += 1
        self._high.append(loss)
        if self._since >= _HISTORY:
            self._diverges = median(self._high) > floor
            if not self._diverges:
                self._since = 0
                self._high.clear()

    def _remember(self, loss: float) -> None:
        self._order.append(loss)
        insort(self._sorted, loss)
        if len(self._order) > _HISTORY:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]


def _verdict(kind: VerdictKind, sample: LossSample, usual: float) -> Verdict:
    severity, message, change = {
        VerdictKind.LOSS_NOT_FINITE: (
            Severity.CRITICAL, "the loss of rank {rank} is {loss} in step {step}",
            'resume from the last checkpoint with a lower train.lr, or set train.guard = "roll_back"',
        ),
        VerdictKind.DIVERGENCE: (
            Severity.CRITICAL, "the loss diverges: {loss:.4g} in step {step}, {excess:.0f} % above its usual {usual:.4g}",
            "resume from a checkpoint before the rise with a lower train.lr",
        ),
        VerdictKind.LOSS_SPIKE: (
            Severity.INFO, "the loss jumps to {loss:.4g} in step {step}, {excess:.0f} % above its usual {usual:.4g}",
            "check the samples of this step if jumps repeat",
        ),
    }[kind]  # fmt: skip
    excess = 100 * (sample.loss - usual) / abs(usual) if usual else math.nan
    return raise_verdict(
        kind, severity, message.format(rank=sample.rank, loss=sample.loss, step=sample.step, excess=excess, usual=usual), change,
        ranks=[sample.rank] if kind is VerdictKind.LOSS_NOT_FINITE else [], time_s=sample.time_s, steps=(sample.step, sample.step), evidence={"loss": sample.loss, "usual_loss": usual},
        cost_s_per_hour=0.0 if severity is Severity.INFO else 3600,
    )  # fmt: skip
