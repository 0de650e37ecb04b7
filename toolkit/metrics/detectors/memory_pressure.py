"""Memory that is mostly in use: `memory_pressure`."""

from collections.abc import Iterable

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import MemorySample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict
from toolkit.units import format_bytes_in

__all__ = ["MemoryPressureDetector"]

_CHANGE = (
    "`toolkit bench memory JOB` shows what uses it; use train.recompute, train.offload or a smaller train.micro_batch"
)


class MemoryPressureDetector:
    """Compares what the ranks use of each pool with what they could use; a level ends only below it by a margin."""

    clear_after = 1

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], int] = {}

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
        share, before = used / whole if whole else 0.0, self._levels.get((host, pool), 0)
        kept = (limit(name) - limit("pressure.margin") * (level <= before) for level, name in enumerate(_LIMITS, 1))
        level = self._levels[host, pool] = sum(share >= least for least in kept)
        if not level:
            return None
        sizes = " of ".join(format_bytes_in(size, "GiB", digits=1) for size in (used, whole))
        return raise_verdict(
            VerdictKind.MEMORY_PRESSURE, Severity.WARNING if level > 1 else Severity.INFO,
            f"the ranks on node {host} use {share:.0%} of the memory of {pool} that they may use ({sizes})", _CHANGE,
            host=host, device=pool, cause="use", time_s=samples[-1].time_s,
            evidence={"used_bytes": used, "limit_bytes": whole},
        )  # fmt: skip


_LIMITS = ("pressure.info", "pressure.warning")
