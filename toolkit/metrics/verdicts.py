"""`metrics/verdicts.jsonl`: what is wrong in a running job, one line per change. Standard library only.

The supervisor is the only writer. A verdict is raised once and cleared once; while it stays raised, a line with a
higher severity replaces it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from toolkit.errors import counted
from toolkit.metrics.limits import limit
from toolkit.metrics.records import RecordLog, read_records
from toolkit.rundir.files import utc_of
from toolkit.units import round_duration

__all__ = [
    "Severity", "Verdict", "VerdictKind", "VerdictLog", "line_of_verdict", "names_of_ranks", "open_verdicts",
    "raise_verdict", "read_verdicts",
]  # fmt: skip

_DIGITS = 6  # significant digits of numbers in the file
_MOST_NAMED = 4  # ranks in one line for a terminal
SEVERAL = "several"  # the device of a verdict that combines those of many ranks or nodes


class Severity(StrEnum):
    """INFO costs little. WARNING costs time now. CRITICAL destroys the run or most of its time. In rising order."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def order(self) -> int:
        return tuple(Severity).index(self)


class VerdictKind(StrEnum):
    """What a verdict reports; the limits of each kind are in `limits.LIMITS`."""

    STRAGGLER = "straggler"
    SLOW_NODE = "slow_node"
    MEMORY_LEAK = "memory_leak"
    MEMORY_PRESSURE = "memory_pressure"
    LOSS_NOT_FINITE = "loss_not_finite"
    LOSS_SPIKE = "loss_spike"
    DIVERGENCE = "divergence"
    THROUGHPUT = "throughput_drop"
    STALL = "stall"
    STARVATION = "data_starvation"
    IMBALANCE = "load_imbalance"
    CONTENTION = "cpu_contention"
    SLOW_SAVE = "slow_save"
    SAVE_SHARE = "save_share"
    GPU_IDLE = "gpu_idle"
    GPU_HOT = "gpu_hot"
    GPU_THROTTLED = "gpu_throttled"
    GPU_ECC = "gpu_ecc"
    LINK_ERRORS = "link_errors"
    SLOW_LINK = "slow_link"
    DISK = "disk_pressure"
    CLOCK_SKEW = "clock_skew"


@dataclass(frozen=True)
class Verdict:
    """One fault. The fields are the columns of the file, in this order.

    ranks: the ranks that cause the fault; empty if all ranks share it.
    host, device: the node, and the GPU, network device or memory on it; "" if the fault has none.
    cause: a stable term for the cause, "" if the numbers do not show it.
    message: the fault in one line, without cost and change.
    change: the command to run or the key to change.
    evidence: the numbers that triggered the verdict, with units in their names.
    cost_s_per_hour: the time that the job loses per hour.
    first_step, last_step: the steps that the evidence covers; 0 if it covers none.
    time: UTC, ISO 8601.
    """

    kind: VerdictKind
    severity: Severity
    ranks: tuple[int, ...]
    host: str
    device: str
    cause: str
    message: str
    change: str
    evidence: Mapping[str, float]
    cost_s_per_hour: float
    first_step: int
    last_step: int
    time: str
    attempt: int = 0
    state: Literal["raised", "cleared"] = "raised"

    @property
    def key(self) -> tuple[VerdictKind, tuple[int, ...], str, str]:
        """What identifies a fault while its numbers change."""
        return (self.kind, () if self.device == SEVERAL else self.ranks, self.host, self.device)

    def to_line(self) -> str:
        numbers = {name: _rounded(value) for name, value in self.evidence.items() if math.isfinite(value)}
        row = asdict(self) | {"evidence": numbers, "cost_s_per_hour": _rounded(self.cost_s_per_hour)}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Self:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {line[:60]!r}")
        row["kind"], row["severity"] = VerdictKind(row["kind"]), Severity(row["severity"])
        ranks, numbers = row["ranks"], row["evidence"]
        if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
            raise ValueError(f"expected a list of ranks, got {ranks!r}")
        if not isinstance(numbers, dict) or any(type(value) not in (int, float) for value in numbers.values()):
            raise ValueError(f"expected numbers as evidence, got {numbers!r}")
        for name, types in _TYPES.items():
            if type(row[name]) not in types:
                raise ValueError(f"expected {types[-1].__name__} as {name}, got {row[name]!r}")
        if row["state"] not in ("raised", "cleared"):
            raise ValueError(f'expected "raised" or "cleared" as state, got {row["state"]!r}')
        return cls(**row | {"ranks": tuple(ranks)})


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "device", "cause", "message", "change", "time"), (str,)),
    **dict.fromkeys(("first_step", "last_step", "attempt"), (int,)),
    "cost_s_per_hour": (int, float),
}


class VerdictLog(RecordLog[Verdict]):
    """Appends to `verdicts.jsonl`."""


def raise_verdict(
    kind: VerdictKind, severity: Severity, message: str, change: str, *, time_s: float, ranks: Iterable[int] = (),
    host: str = "", device: str = "", cause: str = "", evidence: Mapping[str, float] | None = None,
    cost_s_per_hour: float = 0.0, steps: tuple[int, int] = (0, 0),
) -> Verdict:  # fmt: skip
    """Return a raised verdict of the time `time_s`, in seconds since the epoch."""
    return Verdict(
        kind, severity, tuple(ranks), host, device, cause, message, change, dict(evidence or {}),
        max(0.0, cost_s_per_hour), *steps, utc_of(time_s),
    )  # fmt: skip


def clear_verdict(verdict: Verdict, time_s: float) -> Verdict:
    """Return the line that ends a raised verdict."""
    return replace(verdict, state="cleared", time=utc_of(time_s))


def read_verdicts(path: Path) -> list[Verdict]:
    """Return all lines of the file in order, even while a writer is active; raises the errors of `read_records`."""
    return list(read_records(path, Verdict.from_line, what="verdict"))


def open_verdicts(verdicts: Iterable[Verdict], attempt: int) -> list[Verdict]:
    """Return the verdicts of an attempt that are still raised, the most severe and expensive first."""
    latest = {verdict.key: verdict for verdict in verdicts if verdict.attempt == attempt}
    raised = [verdict for verdict in latest.values() if verdict.state == "raised"]
    return sorted(raised, key=lambda one: (-one.severity.order, -one.cost_s_per_hour))


def line_of_verdict(verdict: Verdict, *, is_past: bool = False) -> str:
    """Return one line for a terminal: the fault, what it costs, and what to do; `is_past` if its attempt has ended."""
    if verdict.state == "cleared":
        return f"cleared: {verdict.message}"
    cost = f" costs {round_duration(verdict.cost_s_per_hour)} per hour;" if verdict.cost_s_per_hour >= 1 else ""
    return f"{'past ' if is_past else ''}{verdict.severity}: {verdict.message}:{cost} {verdict.change}"


def severity_of(share: float) -> Severity:
    """Return the severity of a fault that costs a share of the time."""
    if share >= limit("severity.critical"):
        return Severity.CRITICAL
    return Severity.WARNING if share >= limit("severity.warning") else Severity.INFO


def names_of_ranks(ranks: Iterable[int], host: str = "") -> str:
    """Return "rank 3 on node n2", "ranks 1, 2" or "ranks 0, 1, 2, 3 and 60 ranks"."""
    numbers = list(ranks)
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    rest = f" and {counted(len(numbers) - _MOST_NAMED, 'rank')}" if len(numbers) > _MOST_NAMED else ""
    return f"rank{'' if len(numbers) == 1 else 's'} {named}{rest}" + (f" on node {host}" if host else "")


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
