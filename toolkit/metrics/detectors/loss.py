"""A loss that is not finite, that jumps, or that does not return: `loss_not_finite`, `loss_spike`, `divergence`."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from toolkit.metrics.limits import limit
from toolkit.metrics.robust import mad
from toolkit.metrics.samples import LossSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, names_of_ranks, raise_verdict
from toolkit.metrics.windows import LOSS, NOT_FINITE_AFTER, Window

__all__ = ["LossDetector", "RingLosses"]

_HISTORY = int(limit("loss.history"))
_LATE_S = 40.0  # how long after its start a slot of another node may arrive
_ABSENT_S = 60.0  # a rank without losses while others report theirs has left the job


class RingLosses:
    """The losses that ranks report to their rings, of which windows have the means.

    After a gradient exchange, a loss that is not finite on one rank is so on all ranks. The first one is therefore known
    once all ranks have delivered the window in which it occurred. If it is that of all reporting ranks, none is to blame.
    """

    def __init__(self) -> None:
        self._newest: dict[int, Window] = {}
        self._bad: dict[int, tuple[int, Window]] = {}  # by rank, the first step that is not finite, and its window

    def samples(self, slots: Sequence[Window], now_s: float) -> Iterator[LossSample]:
        """Yield the means of new slots, and the first loss that is not finite while one is."""
        for slot in sorted(slots, key=lambda slot: (slot.began_s, slot.rank)):
            if LOSS not in slot.metrics:
                continue
            self._newest[slot.rank] = slot
            if math.isfinite(loss := slot.mean(LOSS)):
                self._bad.pop(slot.rank, None)
                yield LossSample(slot.began_s + slot.seconds, slot.last_step, loss, (slot.rank,), slot.host)
            else:
                self._bad.setdefault(slot.rank, (slot.first_step + int(slot.mean(NOT_FINITE_AFTER)), slot))
        newest_s = max((slot.began_s for slot in self._newest.values()), default=0.0)
        self._newest = {rank: slot for rank, slot in self._newest.items() if newest_s - slot.began_s <= _ABSENT_S}
        self._bad = {rank: bad for rank, bad in self._bad.items() if rank in self._newest}
        if not self._bad:
            return
        step, slot = min(self._bad.values(), key=lambda bad: bad[0])
        if now_s - slot.began_s < _LATE_S and any(one.began_s < slot.began_s for one in self._newest.values()):
            return
        first = tuple(sorted(rank for rank, bad in self._bad.items() if bad[0] == step))
        hosts = {self._newest[rank].host for rank in first}
        is_of_all = len(first) == len(self._newest)
        yield LossSample(
            slot.began_s + slot.seconds, step, slot.mean(LOSS), () if is_of_all else first,
            "" if is_of_all or len(hosts) > 1 else hosts.pop(),
        )  # fmt: skip


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
        rank = min(sample.ranks, default=0)
        self._rank = rank if self._rank is None else min(self._rank, rank)
        if rank != self._rank:
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
            Severity.CRITICAL, "the loss{who} is {loss} in step {step}, its first value that is not finite",
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
    # A loss that jumps is that of the job, or of the rank that reports it for all.
    ranks, host = (sample.ranks, sample.host) if kind is VerdictKind.LOSS_NOT_FINITE else ((), "")
    who = f" of {names_of_ranks(ranks, host)}" if ranks else ""
    if ranks:
        change = f"check the samples and the gradients of {names_of_ranks(ranks)} in this step, and resume from a checkpoint before it"
    return raise_verdict(
        kind, severity, message.format(who=who, loss=sample.loss, step=sample.step, excess=excess, usual=usual), change,
        ranks=ranks, host=host, time_s=sample.time_s, steps=(sample.step, sample.step),
        evidence={"loss": sample.loss, "usual_loss": usual},
        cost_s_per_hour=0.0 if severity is Severity.INFO else 3600,
    )  # fmt: skip
