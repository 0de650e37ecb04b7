"""The step profile of a run: the phases of every rank, and their comparison. Standard library only.

`metrics/profile.json` of a run contains a `StepProfile`; the output of `toolkit bench step --json` adds the advice.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import NotFoundError
from toolkit.metrics.phases import PhaseSum, StepTimes
from toolkit.metrics.typed_json import read_typed
from toolkit.rundir.files import read_json, write_json

__all__ = [
    "ALL_TO_ALL", "BACKWARD", "BUBBLE", "CHECKPOINT", "COMMUNICATION", "DATA", "FILE", "FORWARD", "OPTIMIZER", "RING", "TRACE_FILE", "VALIDATION", "WAITS",
    "PhaseBeside", "RankProfile", "Spread", "StepProfile", "StepSettings", "compare", "read_profile", "summarise",
    "write_profile",
]  # fmt: skip

FILE = "profile.json"
TRACE_FILE = "trace.json"

# Phases of the training loop, in the order of a step. A job may add its own.
DATA, FORWARD, BACKWARD, COMMUNICATION = "data", "forward", "backward", "communication"
OPTIMIZER, VALIDATION, CHECKPOINT, REST = "optimizer", "validation", "checkpoint", "rest"
ALL_TO_ALL, RING = "all_to_all", "ring"  # the communication of experts and of attention over split sequences
WAITS = (COMMUNICATION, ALL_TO_ALL, RING)
BUBBLE = "bubble"  # a stage of a pipeline waits for its neighbors
USUAL = (DATA, FORWARD, BACKWARD, *WAITS, BUBBLE, OPTIMIZER, VALIDATION, CHECKPOINT)


@dataclass(frozen=True)
class PhaseSummary:
    """One phase on one rank. Seconds exclude inner phases.

    calls, total_s: totals over all profiled steps.
    mean_s, p50_s, p95_s: per step.
    share: fraction of the time of all steps.
    """

    name: str
    calls: int
    total_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    share: float


@dataclass(frozen=True)
class Spread:
    """The minimum, median and maximum of a number over the ranks, and the ranks with the minimum and maximum."""

    min: float
    median: float
    max: float
    min_rank: int
    max_rank: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of the values, which are in rank order."""
        low, high = min(values), max(values)
        return cls(low, statistics.median(values), high, values.index(low), values.index(high))


@dataclass(frozen=True)
class PhaseOverRanks:
    """One phase on all ranks.

    calls: the maximum over ranks.
    mean_s, share: means over ranks and steps, so that the phases add up to the step.
    p50_s: the median over ranks of each rank's median per step.
    p95_s: the largest 95th percentile of any rank.
    ranks: the spread of `mean_s` over the ranks.
    """

    name: str
    calls: int
    mean_s: float
    share: float
    p50_s: float
    p95_s: float
    ranks: Spread


@dataclass(frozen=True)
class PhaseBeside:
    """A phase of a thread other than the training thread, on rank 0. It may slow down a step, but is not part of it."""

    thread: str
    name: str
    calls: int
    total_s: float


@dataclass(frozen=True)
class StepSettings:
    """The job settings that the advice uses. `fused` is the optimizer option; null if it has none."""

    batch: int
    micro_batch: int
    passes: int
    fused: bool | None


@dataclass(frozen=True)
class RankProfile:
    """The steps of one rank."""

    host: str
    step: PhaseSummary
    phases: tuple[PhaseSummary, ...]
    overlap_s: float | None
    peak_resident_bytes: int
    peak_device_bytes: int | None


@dataclass(frozen=True)
class StepProfile:
    """The profiled steps of a run; docs/bench.md has the keys."""

    schema_version: int
    time: str
    toolkit: str
    torch: str
    device: str
    ranks: int
    nodes: int
    mesh: dict[str, int]
    settings: StepSettings
    first_step: int
    steps: int
    tokens_per_step: int
    tokens_per_s: float
    step: PhaseOverRanks
    phases: tuple[PhaseOverRanks, ...]
    work: Spread
    overlap_s: float | None
    beside: tuple[PhaseBeside, ...]
    peak_resident_bytes: Spread
    peak_device_bytes: Spread | None
    left_out: tuple[str, ...]

    def phase(self, name: str) -> PhaseOverRanks | None:
        """Return the phase of that name; None if no rank entered it."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def share(self, name: str) -> float:
        """Return a phase's fraction of the step, 0 if no rank entered it."""
        found = self.phase(name)
        return found.share if found else 0.0


def summarise(steps: Sequence[StepTimes]) -> tuple[PhaseSummary, tuple[PhaseSummary, ...]]:
    """Return the summary of one rank's steps, and those of its phases; the last is "rest", the time outside of phases.

    Args:
        steps: at least one.
    """
    whole = _summary("step", len(steps), [step.total_ns for step in steps], 0)
    names = {name: None for step in steps for name in step.phases}
    ordered = [*(name for name in USUAL if name in names), *sorted(set(names) - set(USUAL))]
    total_ns, nothing = sum(step.total_ns for step in steps), PhaseSum()
    phases = []
    for name in ordered:
        of_steps = [step.phases.get(name, nothing) for step in steps]
        phases.append(_summary(name, sum(one.calls for one in of_steps), [one.own_ns for one in of_steps], total_ns))
    rest = [step.total_ns - sum(phase.own_ns for phase in step.phases.values()) for step in steps]
    return whole, (*phases, _summary(REST, len(steps), rest, total_ns))


def _summary(name: str, calls: int, own_ns: list[int], total_ns: int) -> PhaseSummary:
    seconds = sorted(value / 1e9 for value in own_ns)
    total_s = sum(own_ns) / 1e9
    last = len(seconds) - 1
    share = sum(own_ns) / total_ns if total_ns else 1.0
    p95_s = seconds[min(last, round(0.95 * last))]
    return PhaseSummary(name, calls, total_s, total_s / len(seconds), statistics.median(seconds), p95_s, share)


def over_ranks(summaries: Sequence[PhaseSummary | None], total_s: float) -> PhaseOverRanks:
    """Combine a phase of all ranks (None: never entered); `total_s` is the sum over the steps of all ranks."""
    known = [one for one in summaries if one is not None]
    means = [one.mean_s if one else 0.0 for one in summaries]
    return PhaseOverRanks(
        name=known[0].name,
        calls=max(one.calls for one in known),
        mean_s=statistics.fmean(means),
        share=sum(one.total_s for one in known) / total_s if total_s else 0.0,
        p50_s=statistics.median(one.p50_s if one else 0.0 for one in summaries),
        p95_s=max(one.p95_s for one in known),
        ranks=Spread.of(means),
    )


def compare(ranks: Sequence[RankProfile]) -> tuple[PhaseOverRanks, tuple[PhaseOverRanks, ...], Spread]:
    """Return the step, its phases, and the spread over ranks of the step time without communication."""
    total_s = sum(rank.step.total_s for rank in ranks)
    of_ranks = [{phase.name: phase for phase in rank.phases} for rank in ranks]
    names = {name: None for named in of_ranks for name in named}
    ordered = [*(name for name in USUAL if name in names), *sorted(set(names) - {*USUAL, REST}), REST]
    phases = tuple(over_ranks([named.get(name) for named in of_ranks], total_s) for name in ordered)
    waited = [sum(named[name].mean_s for name in (*WAITS, BUBBLE) if name in named) for named in of_ranks]
    work = Spread.of([rank.step.mean_s - wait for rank, wait in zip(ranks, waited, strict=True)])
    return over_ranks([rank.step for rank in ranks], total_s), phases, work


def write_profile(path: Path, profile: StepProfile) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(profile))


def read_profile(path: Path) -> StepProfile:
    """Read the profile in a file.

    Raises:
        ToolkitError: the file is missing or invalid; the error names the key.
    """
    if not path.exists():
        raise NotFoundError(
            "no step profile found",
            where=str(path),
            fix="set train.profile_steps in a job that uses `training_steps`, as train_lm does",
        )
    value = read_json(path)
    if isinstance(value, dict):
        value.pop("advice", None)  # `--json` adds it; it follows from the rest
    found: StepProfile = read_typed(
        value, StepProfile, str(path), what="a step profile", fix="profile again, with this version"
    )
    return found
