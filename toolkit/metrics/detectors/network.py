"""Communication that has become slower than earlier in this attempt: `slow_link`.

In the fastest step of a window, the rank that arrives last does not wait, so the least exposed communication of all ranks
is that of the network. Busy CPUs slow communication down, too, and are excluded by the time that ranks wait for a CPU.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from statistics import fmean, median

from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import BYTES, CPU_WAIT, EXPOSED, STEP, WORK, Window

__all__ = ["SlowLinkDetector"]

_HISTORY = 60  # windows without a fault to compare with
_ABSENT_S = 300.0  # a rank without steps while others finish steps has left the job


@dataclass(frozen=True)
class _Communication:
    """What a step spends in a window; seconds and bytes."""

    least_s: float
    step_s: float
    cpu_wait_s: float
    sent: float  # 0 if the program does not record it
    work_s: float


class SlowLinkDetector:
    """Compares the least exposed communication in windows of 10 s with the median of the earlier ones."""

    clear_after = 3

    def __init__(self) -> None:
        self._open: dict[float, dict[int, Window]] = {}  # by the start of the slot
        self._seen_s: dict[int, float] = {}
        self._usual: deque[_Communication] = deque(maxlen=_HISTORY)
        self._hits: deque[_Communication] = deque(maxlen=int(limit("slow_link.hits")))

    def observe(self, slots: Iterable[Window]) -> list[list[Verdict]]:
        """Return the verdicts of each slot that all ranks have delivered."""
        found = []
        for slot in slots:
            if slot.steps and EXPOSED in slot.metrics and STEP in slot.metrics:
                self._open.setdefault(slot.began_s, {})[slot.rank] = slot
                self._seen_s[slot.rank] = max(slot.began_s, self._seen_s.get(slot.rank, 0.0))
        newest_s = max(self._seen_s.values(), default=0.0)
        self._seen_s = {rank: at for rank, at in self._seen_s.items() if newest_s - at <= _ABSENT_S}
        for began_s in sorted(self._open):
            if self._seen_s.keys() <= self._open[began_s].keys():
                found.append(self._judged(list(self._open[began_s].values())))
                self._open = {later: of for later, of in self._open.items() if later > began_s}
        self._open = {at: of for at, of in self._open.items() if newest_s - at <= _ABSENT_S}
        return found

    def _judged(self, windows: list[Window]) -> list[Verdict]:
        if len(windows) < 2:
            return []
        now = _Communication(
            min(window.metrics[EXPOSED].minimum for window in windows), median(window.mean(STEP) for window in windows),
            fmean(window.mean(CPU_WAIT) for window in windows), fmean(window.mean(BYTES) for window in windows),
            median(window.mean(WORK) for window in windows),
        )  # fmt: skip
        if len(self._usual) < limit("slow_link.fewest"):
            self._usual.append(now)
            return []
        usual = _Communication(*map(median, zip(*map(astuple, self._usual), strict=True)))
        more_s = now.least_s - usual.least_s
        is_slow = (
            now.least_s > limit("slow_link.factor") * usual.least_s
            and more_s > limit("slow_link.share") * now.step_s
            and now.cpu_wait_s - usual.cpu_wait_s < limit("straggler.explained") * more_s
            and now.sent <= limit("slow_link.bytes") * usual.sent
            # Larger samples take longer to compute, too.
            and (usual.sent > 0 or now.work_s <= limit("slow_link.bytes") * usual.work_s)
        )
        if not is_slow:
            self._usual.append(now)
            self._hits.clear()
            return []
        self._hits.append(now)
        if len(self._hits) < limit("slow_link.hits"):
            return []
        share = more_s / now.step_s
        return [
            raise_verdict(
                VerdictKind.SLOW_LINK, severity_of(share),
                f"communication takes at least {1e3 * now.least_s:.4g} ms of each step instead of {1e3 * usual.least_s:.4g} ms "
                f"earlier in this attempt, for the same {'data' if usual.sent else 'work'}: the network of a node is slow",
                "compare the nodes in pairs with `toolkit bench collectives`, and report the slow one to the site",
                cause="network", time_s=max(window.began_s + window.seconds for window in windows),
                steps=(min(window.first_step for window in windows), max(window.last_step for window in windows)),
                cost_s_per_hour=3600 * share,
                evidence={"least_communication_s": now.least_s, "usual_communication_s": usual.least_s, "sent_bytes": now.sent},
            )
        ]  # fmt: skip
