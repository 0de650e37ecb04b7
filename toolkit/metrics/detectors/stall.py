"""A job whose ranks finish no steps: `stall`."""

from collections import deque
from collections.abc import Iterable
from statistics import median

from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, names_of_ranks, raise_verdict
from toolkit.metrics.windows import SAVE, STEP, Window
from toolkit.units import round_duration

__all__ = ["StallDetector"]

_ABSENT_S = 300.0  # a rank without steps while others finish steps has left the job
_STEPS = 500  # steps of a rank among which the longest counts
_UNWRITTEN_S = 0.75  # a rank that hangs has not written its last steps, which took 0.5 s or less


class StallDetector:
    """Compares the time since the last finished step with the length of earlier steps."""

    clear_after = 1  # a finished step ends the stall

    def __init__(self) -> None:
        self._newest: dict[int, Window] = {}
        self._paused_s = 0.0  # when a save or validation last ran
        self._longest: deque[tuple[int, float]] = deque()  # last step of a slot, longest step without saves

    def observe(self, slots: Iterable[Window], *, now_s: float, is_paused: bool = False) -> list[Verdict]:
        self._paused_s = now_s if is_paused else self._paused_s
        for slot in slots:
            if slot.steps and STEP in slot.metrics:
                known = self._newest.get(slot.rank)
                if known is None or slot.began_s >= known.began_s:
                    self._newest[slot.rank] = slot
                save_s = slot.metrics[SAVE].maximum if SAVE in slot.metrics else 0.0
                self._longest.append((slot.last_step, max(0.0, slot.metrics[STEP].maximum - save_s)))
        if not self._newest:
            return []  # the first step may include a long start
        newest_s = max(slot.began_s for slot in self._newest.values())
        self._newest = {rank: slot for rank, slot in self._newest.items() if newest_s - slot.began_s <= _ABSENT_S}
        steps = {rank: slot.last_step for rank, slot in self._newest.items()}
        done = max(steps.values())
        while self._longest and (self._longest[0][0] < done - _STEPS or len(self._longest) > 100 * len(steps)):
            self._longest.popleft()
        usual_s = median(slot.metrics[STEP].median for slot in self._newest.values())
        longest_s = max((seconds for _, seconds in self._longest), default=0.0)
        least_s = max(limit("stall.seconds"), limit("stall.medians") * usual_s, limit("stall.longest") * longest_s)
        last_s = max(self._paused_s, *(slot.began_s + slot.seconds for slot in self._newest.values()))
        if now_s - last_s <= least_s:
            return []
        late = sorted(rank for rank, step in steps.items() if (done - step) * usual_s > _UNWRITTEN_S)
        return [_stall(done, late, self._newest, now_s=now_s, waits_s=now_s - last_s, least_s=least_s)]


def _stall(
    done: int, late: list[int], newest: dict[int, Window], *, now_s: float, waits_s: float, least_s: float
) -> Verdict:
    host = newest[late[0]].host if len({newest[rank].host for rank in late}) == 1 else ""
    behind = f"; {names_of_ranks(late, host)} did not finish step {done}" if late else ""
    return raise_verdict(
        VerdictKind.STALL, Severity.CRITICAL if waits_s > limit("stall.critical") * least_s else Severity.WARNING,
        f"no rank has finished a step for {round_duration(waits_s)}{behind}",
        "run `toolkit stacks` to show where each rank waits", ranks=late, host=host, time_s=now_s, steps=(done, done), cost_s_per_hour=3600,
        evidence={"seconds_without_step": waits_s, "limit_s": least_s, "late_ranks": len(late)},
    )  # fmt: skip
