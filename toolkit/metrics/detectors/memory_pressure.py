"""Memory that is mostly in use: `memory_pressure`."""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import MemorySample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict
from toolkit.units import format_bytes_in, round_duration

__all__ = ["MemoryPressureDetector"]

_CHANGE = (
    "`toolkit bench memory JOB` shows what uses it; use train.recompute, train.offload or a smaller train.micro_batch"
)
_CHANGE_OF_HOST = (
    "request more with --set job.mem_gb_per_node=GIB, use fewer ranks per node, train.offload or fewer data.workers"
)
_GROWTH_S = 60.0  # the growth of this time predicts when the limit is reached


class MemoryPressureDetector:
    """Compares what the ranks use of each pool with what they could use; a level ends only below it by a margin."""

    clear_after = 1

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], int] = {}
        self._uses: dict[tuple[str, str], deque[tuple[float, float]]] = {}  # times and bytes of the last samples

    def observe(self, samples: Iterable[MemorySample]) -> list[Verdict]:
        pools: dict[tuple[str, str], list[MemorySample]] = {}
        for sample in samples:
            pools.setdefault((sample.host, sample.pool), []).append(sample)
        found = [self._judged(host, pool, of_pool) for (host, pool), of_pool in pools.items()]
        return [verdict for verdict in found if verdict is not None]

    def _judged(self, host: str, pool: str, samples: list[MemorySample]) -> Verdict | None:
        last = {sample.rank: sample for sample in samples}
        used = sum(sample.used_bytes for sample in last.values())
        whole = used + min(sample.free_bytes for sample in last.values())
        uses = self._uses.setdefault((host, pool), deque())
        uses.append((samples[-1].time_s, used))
        while uses[-1][0] - uses[0][0] > _GROWTH_S:
            uses.popleft()
        share, before = used / whole if whole else 0.0, self._levels.get((host, pool), 0)
        kept = (limit(name) - limit("pressure.margin") * (level <= before) for level, name in enumerate(_LIMITS, 1))
        level = self._levels[host, pool] = sum(share >= least for least in kept)
        if not level:
            return None
        sizes = " of ".join(format_bytes_in(size, "GiB", digits=1) for size in (used, whole))
        left_s = self._left_s((host, pool), whole)
        soon = f", and reach the limit in {round_duration(left_s)} at the growth of the last minute" if left_s else ""
        return raise_verdict(
            VerdictKind.MEMORY_PRESSURE, Severity.WARNING if level > 1 else Severity.INFO,
            f"the ranks on node {host} use {share:.0%} of the memory of {pool} that they may use ({sizes}){soon}",
            _CHANGE_OF_HOST if pool == "host" else _CHANGE,
            host=host, device=pool, cause="use", time_s=samples[-1].time_s,
            evidence={"used_bytes": used, "limit_bytes": whole} | ({"seconds_to_limit": left_s} if left_s else {}),
        )  # fmt: skip

    def _left_s(self, key: tuple[str, str], whole: float) -> float:
        """Return the time until the limit at the growth of the last minute; 0 unless each sample exceeds the one before."""
        uses = self._uses[key]
        (began_s, least), (end_s, most) = uses[0], uses[-1]
        if end_s - began_s < _GROWTH_S / 2 or any(later[1] <= earlier[1] for earlier, later in pairwise(uses)):
            return 0.0
        return (whole - most) / (most - least) * (end_s - began_s)


_LIMITS = ("pressure.info", "pressure.warning")
