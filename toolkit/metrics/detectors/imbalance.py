"""Ranks that wait for each other although no rank or node is slow: `load_imbalance`, `cpu_contention`.

The slowest rank of a step only pays for the communication itself, so the lowest exposed communication estimates that
part, and what the ranks wait beyond it is imbalance. Work must vary, too: otherwise the network is slow at times. If the
ranks wait for a CPU meanwhile, their work may well be equal.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from statistics import fmean, median

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.robust import entropy
from toolkit.metrics.verdicts import Verdict, VerdictKind, raise_verdict, severity_of
from toolkit.metrics.windows import CPU_WAIT, EXPOSED, WORK, WORK_CPU, Window

__all__ = ["ImbalanceDetector"]

_LAST_RANKS = 20  # blocks whose last rank counts
_BLOCKS = 5


class ImbalanceDetector:
    """Judges waiting and variation of work in each block, and how often the last rank changes."""

    clear_after = 5

    def __init__(self, peers: Mapping[int, int] | None = None) -> None:
        self._peers = {} if peers is None else peers  # the stage of each rank in a pipeline; may be filled later
        self._waiting: deque[float] = deque(maxlen=_BLOCKS)  # share of the step; 0 if work does not vary
        self._last: deque[int] = deque(maxlen=_LAST_RANKS)
        self._busy_hosts: deque[str] = deque(maxlen=_BLOCKS)  # whose CPUs are much busier than those of the others

    def observe(self, block: StepBlock) -> list[Verdict]:
        stages: dict[int, list[Window]] = {}
        for window in block.windows:
            if WORK in window.metrics and EXPOSED in window.metrics:
                stages.setdefault(self._peers.get(window.rank, 0), []).append(window)
        # All other stages of a pipeline wait for this one at the end of a step, whatever their work is.
        windows = min(stages.values(), key=lambda stage: fmean(one.mean(EXPOSED) for one in stage), default=[])
        if len(windows) < 2 or not block.step_s:
            return []
        pure_s = min(window.metrics[EXPOSED].minimum for window in windows)
        waiting = (fmean(window.mean(EXPOSED) for window in windows) - pure_s) / block.step_s
        variation = fmean(_variation(window, WORK) for window in windows)
        self._waiting.append(waiting if variation > limit("imbalance.variation") else 0.0)
        self._last.append(max(windows, key=lambda window: window.mean(WORK)).rank)
        self._busy_hosts.append(_busy_host(windows))
        needed = limit("imbalance.hits")
        hits = sum(share > limit("imbalance.waiting") for share in self._waiting)
        highest = math.log(min(len(windows), len(self._last)))
        recent = Counter(list(self._last)[-_BLOCKS:])
        if (
            hits < needed
            or max(recent.values()) >= needed  # a straggler, even if it was not one before
            or entropy(self._last) <= limit("imbalance.entropy") * highest
        ):
            return []
        share = fmean(self._waiting)
        has_waits = all(CPU_WAIT in window.metrics for window in windows)
        cpu_wait_s = fmean(window.mean(CPU_WAIT) for window in windows)
        of_cpu = fmean(_variation(window, WORK_CPU) for window in windows)
        kind, cause, reason, change, host = VerdictKind.IMBALANCE, *_UNKNOWN, ""
        if cpu_wait_s >= limit("imbalance.cpu_wait") * share * block.step_s:
            kind, (host, count) = VerdictKind.CONTENTION, Counter(self._busy_hosts).most_common(1)[0]
            host = host if count >= needed else ""
            cause, reason, change = _ON_NODE if host else _ON_ALL_NODES
        elif has_waits and of_cpu >= limit("imbalance.cpu_variation") * variation:
            cause, reason, change = _WORK
        return [
            raise_verdict(
                kind, severity_of(share),
                f"the ranks wait {100 * share:.0f} % of each step for the slowest one, which changes: {reason.format(host=host)}",
                change.format(host=host), host=host,
                cause=cause, time_s=block.end_s, steps=block.steps, cost_s_per_hour=3600 * share,
                evidence={"waiting_share": share, "variation_of_work": variation, "variation_of_cpu": of_cpu,
                          "cpu_wait_s": cpu_wait_s},
            )
        ]  # fmt: skip


def _busy_host(windows: list[Window]) -> str:
    """Return the node whose ranks wait for a CPU several times as long as those of the median other node, or ""."""
    by_host: dict[str, list[float]] = {}
    for window in windows:
        by_host.setdefault(window.host, []).append(window.mean(CPU_WAIT))
    waits = {host: fmean(values) for host, values in by_host.items()}
    host = max(waits, key=waits.__getitem__)
    others = [wait_s for other, wait_s in waits.items() if other != host]
    return host if others and waits[host] > limit("imbalance.node") * median(others) else ""


_WORK = ("work", "their work differs",
         "give all ranks samples of equal length: sort or pack them")  # fmt: skip
_UNKNOWN = ("", "their work differs, or files, locks or other processes delay them",
            "check which part of the step varies: `toolkit bench step`, `toolkit stacks`")  # fmt: skip
_ON_NODE = ("neighbours", "other processes use the CPUs of node {host}",
            "request whole nodes with --set job.sbatch=--exclusive, or exclude it with --exclude {host}")  # fmt: skip
_ON_ALL_NODES = ("neighbours", "all of them wait for CPUs, which other processes or too many threads use",
                 "request whole nodes with --set job.sbatch=--exclusive, and as many CPUs as threads (job.cpus_per_rank)")  # fmt: skip


def _variation(window: Window, metric: str) -> float:
    found = window.metrics.get(metric)
    return found.p95 / found.median - 1 if found and found.median else 0.0
