"""Memory that rises until it reaches its limit: `memory_leak`."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from toolkit.metrics.limits import limit
from toolkit.metrics.robust import mann_kendall_z, theil_sen
from toolkit.metrics.samples import MemorySample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, names_of_ranks, raise_verdict
from toolkit.units import round_duration

__all__ = ["MemoryLeakDetector"]


_SCALES = ("slow", "fast")
_BLOCKS = 12  # in the window of a scale
_ABSENT_S = 300.0


@dataclass
class _Series:
    """The memory of a rank in a pool: the minimum of each block of samples, against sawtooth patterns."""

    scale: str
    minima: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_BLOCKS))
    block: list[MemorySample] = field(default_factory=list)
    newest: MemorySample | None = None
    rise: float = 0.0  # bytes per second; 0 if there is no trend

    def add(self, sample: MemorySample) -> bool:
        """Return whether the sample completes a block."""
        self.newest = sample
        self.block.append(sample)
        if len(self.block) < limit(f"leak.{self.scale}_block"):
            return False
        lowest = min(self.block, key=lambda one: one.used_bytes)
        self.minima.append((lowest.time_s, lowest.used_bytes))
        self.block.clear()
        self.rise = _rise(list(self.minima))
        return True


class MemoryLeakDetector:
    """Judges the trend of each rank in each pool, and the time until all ranks of a pool exhaust it.

    The slow scale finds leaks that reach the limit within a day. The fast one finds those that would reach it before the
    slow scale has seen enough.
    """

    clear_after = 20  # blocks of the fast scale: 10 min

    def __init__(self) -> None:
        self._series: dict[tuple[str, int, str, str], _Series] = {}

    def observe(self, samples: Iterable[MemorySample], *, walltime_left_s: float | None = None) -> list[Verdict] | None:
        """Return the leaks; None if no series has completed a block."""
        has_news, newest_s = False, 0.0
        for sample in samples:
            newest_s = max(newest_s, sample.time_s)
            for scale in _SCALES:
                key = (sample.host, sample.rank, sample.pool, scale)
                has_news |= self._series.setdefault(key, _Series(scale)).add(sample)
        self._series = {
            key: series for key, series in self._series.items()
            if series.newest and newest_s - series.newest.time_s <= _ABSENT_S
        }  # fmt: skip
        return list(self._leaks(walltime_left_s)) if has_news else None

    def _leaks(self, walltime_left_s: float | None) -> Iterator[Verdict]:
        """Yield the leak of each rank and pool once, from the slow scale if both find it."""
        pools: dict[tuple[str, str, str], float] = {}
        for (host, _, pool, scale), series in self._series.items():
            pools[host, pool, scale] = pools.get((host, pool, scale), 0.0) + series.rise
        for (host, _, pool, scale), series in self._series.items():
            if series.rise and series.newest:
                left_s = max(0.0, series.newest.free_bytes / pools[host, pool, scale])
                horizon_s = limit(f"leak.{scale}_horizon")
                if left_s <= (horizon_s if walltime_left_s is None else min(horizon_s, walltime_left_s)):
                    yield _leak(series.newest, series.rise, left_s)


def _rise(points: list[tuple[float, float]]) -> float:
    """Return the slope of the minima in bytes per second; 0 unless they rise steadily and enough."""
    if len(points) < limit("leak.blocks"):
        return 0.0
    times, values = [time_s for time_s, _ in points], [used for _, used in points]
    slope = theil_sen(times, values)
    growth = slope * (times[-1] - times[0])
    if growth <= max(limit("leak.bytes"), limit("leak.growth") * values[0]):
        return 0.0
    if mann_kendall_z(values) <= limit("leak.z"):
        return 0.0
    for third in range(3):
        begin, end = third * len(points) // 3, (third + 1) * len(points) // 3
        end = min(len(points) - 1, end)
        if (values[end] - values[begin]) / (times[end] - times[begin]) < limit("leak.third") * slope:
            return 0.0
    return slope


def _leak(sample: MemorySample, rise: float, left_s: float) -> Verdict:
    memory = "memory" if sample.pool == "host" else f"memory of {sample.pool}"
    changes = {True: "find what the program keeps: compare tracemalloc snapshots of two steps, check lists that grow",
               False: "keep losses as numbers (`loss.item()`), not as tensors with their graph"}  # fmt: skip
    return raise_verdict(
        VerdictKind.MEMORY_LEAK,
        Severity.CRITICAL if left_s < limit("leak.critical") else Severity.WARNING,
        f"{memory} of {names_of_ranks([sample.rank], sample.host)} grows by {3600 * rise / 2**30:.2g} GiB per hour and "
        f"reaches the limit in {round_duration(left_s)}",
        changes[sample.pool == "host"] + "; save before the limit",
        ranks=[sample.rank], host=sample.host, device=sample.pool, cause="growth", time_s=sample.time_s,
        evidence={"bytes_per_s": rise, "free_bytes": sample.free_bytes, "seconds_to_limit": left_s,
                  "used_bytes": sample.used_bytes},
    )  # fmt: skip
