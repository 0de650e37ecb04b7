"""Ranks that wait for each other because the work of each step varies: `load_imbalance`; no node is slow.

The slowest rank of a step only pays for the communication itself, so the lowest exposed communication estimates that
part, and what the ranks wait beyond it is imbalance. Work must vary, too: otherwise the network is slow at times.
"""

import math
from collections import deque
from statistics import fmean

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.robust import entropy
from toolkit.metrics.verdicts import Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import CPU_WAIT, EXPOSED, WORK, WORK_CPU, Window

__all__ = ["ImbalanceDetector"]

_LAST_RANKS = 20  # blocks whose last rank counts


class ImbalanceDetector:
    """Judges waiting and variation of work in each block, and how often the last rank changes."""

    clear_after = 5

    def __init__(self) -> None:
        self._waiting: deque[float] = deque(maxlen=5)  # share of the step; 0 if work does not vary
        self._last: deque[int] = deque(maxlen=_LAST_RANKS)

    def observe(self, block: StepBlock) -> list[Verdict]:
        windows = [window for window in block.windows if WORK in window.metrics and EXPOSED in window.metrics]
        if len(windows) < 2 or not block.step_s:
            return []
        pure_s = min(window.metrics[EXPOSED].minimum for window in windows)
        waiting = (fmean(window.mean(EXPOSED) for window in windows) - pure_s) / block.step_s
        variation = fmean(_variation(window, WORK) for window in windows)
        self._waiting.append(waiting if variation > limit("imbalance.variation") else 0.0)
        self._last.append(max(windows, key=lambda window: window.mean(WORK)).rank)
        hits = sum(share > limit("imbalance.waiting") for share in self._waiting)
        highest = math.log(min(len(windows), len(self._last)))
        if hits < limit("imbalance.hits") or entropy(self._last) <= limit("imbalance.entropy") * highest:
            return []
        share = fmean(self._waiting)
        of_cpu = fmean(_variation(window, WORK_CPU) for window in windows)
        has_cpu = all(WORK_CPU in window.metrics for window in windows)
        cause, reason, change = _CAUSES[has_cpu and of_cpu < variation / 2]
        delayed = max(windows, key=lambda window: window.mean(CPU_WAIT))
        cpu_wait_s = delayed.mean(CPU_WAIT)
        if cpu_wait_s >= limit("straggler.explained") * share * block.step_s:
            cause, reason, change = _LOADED
        return [
            raise_verdict(
                VerdictKind.IMBALANCE, severity_of(share),
                f"the ranks wait {100 * share:.0f} % of each step for the slowest one, which changes: {reason.format(host=delayed.host)}",
                change.format(host=delayed.host),
                cause=cause, time_s=block.end_s, steps=block.steps, cost_s_per_hour=3600 * share,
                evidence={"waiting_share": share, "variation_of_work": variation, "variation_of_cpu": of_cpu,
                          "cpu_wait_s": cpu_wait_s},
            )
        ]  # fmt: skip


# By whether the CPU time of work is steady while its wall time varies.
_CAUSES = {
    False: ("work", "their work differs",
            "give all ranks samples of equal length: sort or pack them, or use a larger train.micro_batch"),
    True: ("neighbours", "their CPU time does not vary, so other processes or slow files delay them",
           "request whole nodes with --set job.sbatch=--exclusive, and check the file system"),
}  # fmt: skip
# A loaded node stretches the CPU time of its ranks, too.
_LOADED = ("neighbours", "other processes use the CPUs of node {host}",
           "request whole nodes with --set job.sbatch=--exclusive, or exclude it with --exclude {host}")  # fmt: skip


def _variation(window: Window, metric: str) -> float:
    found = window.metrics.get(metric)
    return found.p95 / found.median - 1 if found and found.median else 0.0
