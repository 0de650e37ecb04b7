"""A rank or node that works longer than the others in most blocks: `straggler`, `slow_node`.

The rule judges work, never communication: while one rank is late, all others spend their time in communication. It
judges CPU time of work in addition to wall time, because neighbours on a busy node disturb wall time only. The time of
work in which the thread was neither running nor ready to run shows a paused rank, even if all ranks share few CPUs.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.limits import limit
from toolkit.metrics.robust import mad
from toolkit.metrics.verdicts import Verdict, VerdictKind, names_of_ranks, raise_verdict, severity_of
from toolkit.metrics.windows import BACKWARD, CPU_WAIT, DATA, FAULTS, FORWARD, OPTIMIZER, WORK, WORK_CPU, Window

__all__ = ["StragglerDetector"]

_BLOCKS, _STRICT_BLOCKS = 5, 6
# Chosen after one false verdict of 40 % in ten real runs beside a load of 11 to 17 on 2 processors; not simulated.
_PER_WAIT = 3.0
_ALSO_COMPARED = (WORK, WORK_CPU, CPU_WAIT, DATA, FAULTS, FORWARD, BACKWARD, OPTIMIZER)

_BLOCKED = "blocked_s"  # of the mean step; not a metric of windows

# By metric, ranks and host: a bit per block that exceeds the limits, the newest lowest.
_Hits = dict[tuple[str, tuple[int, ...], str], int]


@dataclass(frozen=True)
class _Unit:
    """A rank, or the ranks of a node."""

    windows: tuple[Window, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(window.rank for window in self.windows)

    @property
    def host(self) -> str:
        return self.windows[0].host

    def work(self, metric: str) -> tuple[float, float]:
        """Return the median and the mean of work; a node has those of its median rank.

        With 2 ranks, the lower one counts: a slow rank does not make its node slow.
        """
        if metric == _BLOCKED:
            return 0.0, median_low(_blocked_s(window) for window in self.windows)  # only means are known
        if len(self.windows) == 1:
            found = self.windows[0].metrics[metric]
            return found.median, found.mean
        values = [window.metrics[metric] for window in self.windows]
        return median_low(one.median for one in values), median_low(one.mean for one in values)


class StragglerDetector:
    """Compares ranks with their peers: `peers` maps ranks to groups of equal work, such as pipeline stages."""

    clear_after = 5

    def __init__(self, peers: Mapping[int, int] | None = None) -> None:
        self._peers = {} if peers is None else peers  # may be filled later
        self._recent: deque[StepBlock] = deque(maxlen=_STRICT_BLOCKS)
        self._hits: _Hits = {}

    def observe(self, block: StepBlock) -> list[Verdict]:
        self._recent.append(block)
        groups: dict[int, list[Window]] = {}
        for window in block.windows:
            groups.setdefault(self._peers.get(window.rank, 0), []).append(window)
        hits: _Hits = {}
        verdicts = [verdict for group in groups.values() for verdict in self._judge(block, group, hits)]
        self._hits = hits  # forgets the ranks that left
        return verdicts

    def _judge(self, block: StepBlock, group: list[Window], hits: _Hits) -> Iterator[Verdict]:
        by_host: dict[str, list[Window]] = {}
        for window in group:
            by_host.setdefault(window.host, []).append(window)
        slow_hosts: dict[str, set[str]] = {}  # with the metrics that exceed the limits
        if all(len(windows) > 1 for windows in by_host.values()):
            for unit, counts in self._slow(block, [_Unit(tuple(windows)) for windows in by_host.values()], hits):
                if verdict := self._verdict(block, group, unit, counts, VerdictKind.SLOW_NODE):
                    slow_hosts[unit.host] = {*counts}
                    yield verdict
        for unit, counts in self._slow(block, [_Unit((window,)) for window in group], hits):
            # A node with busy neighbours may have a rank that computes longer, or is paused, besides.
            is_explained = counts.keys() <= slow_hosts.get(unit.host, set())
            if not is_explained and (verdict := self._verdict(block, group, unit, counts, VerdictKind.STRAGGLER)):
                yield verdict

    def _slow(self, block: StepBlock, units: list[_Unit], hits: _Hits) -> Iterator[tuple[_Unit, dict[str, str]]]:
        """Yield the units that exceed the limits in enough blocks: for each metric, the number such as "4 of 5"."""
        is_strict = len(units) == 2 or len(units) >= limit("straggler.many")
        blocks, needed = (_STRICT_BLOCKS, "strict_hits") if is_strict else (_BLOCKS, "hits")
        slow: dict[int, dict[str, str]] = {}
        for metric, needed_metrics in _JUDGED.items():
            if len(units) < 2 or not all(
                needed_metrics <= one.metrics.keys() for unit in units for one in unit.windows
            ):
                continue
            if metric == _BLOCKED and any(len(unit.windows) > 1 for unit in units):
                continue  # ranks of a node pause one by one
            step_s = block.step_s if metric == _BLOCKED else 0.0
            factor = _contention(units) if metric == WORK_CPU else 1.0
            exceeding = _exceeding([unit.work(metric) for unit in units], step_s, factor)
            for index, unit in enumerate(units):
                key = (metric, unit.ranks, unit.host)
                mask = (self._hits.get(key, 0) << 1 | (index in exceeding)) & ((1 << blocks) - 1)
                if mask:
                    hits[key] = mask
                if mask.bit_count() >= limit(f"straggler.{needed}"):
                    slow.setdefault(index, {})[metric] = f"{mask.bit_count()} of {blocks}"
        for index, counts in slow.items():
            yield units[index], counts

    def _verdict(
        self, block: StepBlock, group: list[Window], unit: _Unit, counts: dict[str, str], kind: VerdictKind
    ) -> Verdict | None:
        others = [window.rank for window in group if window.rank not in unit.ranks]
        own, usual, gain = self._compare(unit.ranks, others)
        wall = _wall(own)
        least = limit("straggler.median_excess" if counts.keys() == {_BLOCKED} else "straggler.wall_excess")
        if own[wall] - usual[wall] < least * (usual[WORK] if WORK in own else block.step_s):
            return None  # more CPU time that costs nothing, such as that of a rank that logs beside its GPU
        metric = next(name for name in _JUDGED if name in counts)
        compared = WORK if metric == _BLOCKED else metric  # neighbours disturb the excess in wall time
        excess = own[compared] / usual[compared] - 1 if usual[compared] else 0.0
        cause, explanation, change = _cause(own, usual, is_computing=WORK_CPU in counts)
        if cause == "neighbours" and own[CPU_WAIT] < limit("imbalance.node") * usual[CPU_WAIT]:
            return None  # processors are short on all nodes
        who = names_of_ranks(unit.ranks, unit.host) if kind is VerdictKind.STRAGGLER else f"node {unit.host}"
        peers = "the other" if len(others) == 1 else "the others"
        share = gain / block.step_s if block.step_s else 0.0
        return raise_verdict(
            kind, severity_of(share),
            f"{who} {explanation.format(excess=f'{100 * excess:.0f} %', peers=peers)} ({counts[metric]} windows)",
            change.format(host=unit.host, exclude=_exclude(block, unit.host)), ranks=unit.ranks, host=unit.host, cause=cause, time_s=block.end_s,
            evidence={
                "excess": excess, "gain_s": gain, **{f"own_{name}": value for name, value in own.items()},
                **{f"usual_{name}": usual[name] for name in own},
            },
            cost_s_per_hour=3600 * share, steps=(self._recent[0].steps[0], block.steps[1]),
        )  # fmt: skip

    def _compare(self, ranks: Sequence[int], others: Sequence[int]) -> tuple[dict[str, float], dict[str, float], float]:
        """Return the means per step of the ranks, those of the median other rank, and the time per step to gain.

        The gain is what the slowest rank takes longer than the slowest other one. All are means of as many blocks as
        the rule needs hits, so that blocks before the fault do not count.
        """
        owns: list[dict[str, float]] = []
        usuals: list[dict[str, float]] = []
        gains = []
        for block in list(self._recent)[-int(limit("straggler.hits")) :]:
            mine = [block.by_rank[rank] for rank in ranks if rank in block.by_rank]
            rest = [block.by_rank[rank] for rank in others if rank in block.by_rank]
            if mine and rest:
                names = [name for name in _ALSO_COMPARED if name in mine[0].metrics]
                owns.append({name: median_low(window.mean(name) for window in mine) for name in names})
                usuals.append({name: median(window.mean(name) for window in rest) for name in names})
                wall = _wall(mine[0].metrics)
                slowest_other = max(window.mean(wall) for window in block.windows if window.rank not in ranks)
                gains.append(max(0.0, max(window.mean(wall) for window in mine) - slowest_other))
        names = list(owns[-1])
        own = {name: fmean(one.get(name, 0.0) for one in owns) for name in names}
        return own, {name: fmean(one.get(name, 0.0) for one in usuals) for name in names}, fmean(gains)


_JUDGED = {WORK: {WORK}, WORK_CPU: {WORK_CPU}, _BLOCKED: {WORK, WORK_CPU, CPU_WAIT}}


def _blocked_s(window: Window) -> float:
    """Return the time of work in which the thread was neither running nor ready to run."""
    return max(0.0, window.mean(WORK) - window.mean(WORK_CPU) - window.mean(CPU_WAIT))


def _exclude(block: StepBlock, host: str) -> str:
    """Return the advice to exclude a node; "" if the job has no other one."""
    return f", or exclude it with --exclude {host}" if any(one.host != host for one in block.windows) else ""


def _wall(metrics: Mapping[str, object]) -> str:
    """Return the metric of the time that a rank loses: a script that reports only its steps has no wall time of work."""
    return WORK if WORK in metrics else WORK_CPU


def _contention(units: list[_Unit]) -> float:
    """Return by how much CPU times of equal work differ more: shared caches and CPUs disturb them, too."""
    windows = [window for unit in units for window in unit.windows]
    cpu_s, wait_s = (median(window.mean(name) for window in windows) for name in (WORK_CPU, CPU_WAIT))
    return 1 + _PER_WAIT * wait_s / cpu_s if cpu_s else 1.0


def _exceeding(work: list[tuple[float, float]], step_s: float = 0.0, factor: float = 1.0) -> set[int]:
    """Return the indexes of the units that exceed the limits in one block; `factor` raises the limits up to a bound.

    The excess is relative to the work of the others, or to `step_s` if their times may be 0.
    """

    def least_excess(name: str) -> float:
        return min(factor * limit(name), max(limit(name), limit("straggler.cpu_excess")))

    if len(work) == 2:
        pairs = enumerate(((work[0], work[1]), (work[1], work[0])))
        excess = least_excess("straggler.pair_excess")
        return {
            index for index, (own, other) in pairs
            if any(mine > theirs + excess * (step_s or theirs) for mine, theirs in zip(own, other, strict=True))
        }  # fmt: skip
    exceeding: set[int] = set()
    for number, excess in enumerate(map(least_excess, ("straggler.median_excess", "straggler.mean_excess"))):
        values = [one[number] for one in work]
        center = median(values)
        least = max(center + excess * (step_s or center), center + limit("straggler.z") * mad(values, center))
        exceeding.update(index for index, value in enumerate(values) if value > least)
    return exceeding


def _cause(own: Mapping[str, float], usual: Mapping[str, float], *, is_computing: bool) -> tuple[str, str, str]:
    """Return the cause that the numbers show: its term, the explanation and what to change."""
    more = {name: own[name] - usual[name] for name in own}
    lost_s, share = more[_wall(own)], limit("straggler.explained")
    longer = "works {excess} longer than {peers}"
    # Neighbours stretch wall time and CPU time of a busy node by different factors, so excesses are compared, not times.
    cpu_excess = more[WORK_CPU] / usual[WORK_CPU] if usual.get(WORK_CPU) else 0.0
    explains_cpu = cpu_excess >= share * lost_s / usual[_wall(usual)]
    if usual.get(CPU_WAIT, 0.0) > limit("imbalance.cpu_wait") * usual.get(WORK_CPU, 0.0):  # contention does so, too
        explains_cpu = is_computing
    has_neighbours = more.get(CPU_WAIT, 0.0) >= share * lost_s
    if more.get(DATA, 0.0) >= share * lost_s and not has_neighbours:  # they also delay a rank that waits
        return ("data", f"{longer}, waiting for data", "raise data.workers, check the file system of {host}{exclude}")
    if more.get(FAULTS, 0.0) >= limit("straggler.faults") * lost_s:
        return "memory", f"{longer}, waiting for memory pages from disk", "request more memory{exclude}"
    if explains_cpu or (is_computing and not has_neighbours):
        phases = [name for name in (FORWARD, BACKWARD, OPTIMIZER) if more.get(name, 0.0) >= share * lost_s]
        where = f", most of it in {max(phases, key=more.__getitem__).removesuffix('_s')}" if phases else ""
        change = "check the size of its samples, and its clock (`nvidia-smi -q -d PERFORMANCE` for a GPU){exclude}"
        return "own_work", f"computes {{excess}} longer than {{peers}}{where}", change
    if has_neighbours:
        change = "request whole nodes with --set job.sbatch=--exclusive{exclude}"
        return "neighbours", f"{longer}, because other processes use its CPUs", change
    change = "check stopped processes, slow files and GPUs (`nvidia-smi -q -d PERFORMANCE`) on {host}{exclude}"
    # Some kernels do not count waits for a CPU.
    is_known = {WORK_CPU, CPU_WAIT} <= own.keys() and lost_s - more[WORK_CPU] - more[CPU_WAIT] >= share * lost_s
    return ("paused", f"{longer} without using its CPU", change) if is_known else ("", longer, change)
