"""Format a step profile as a table. Standard library only."""

from collections.abc import Iterator

from toolkit.metrics.step_advice import advise
from toolkit.metrics.step_profile import WAITS, PhaseOverRanks, Spread, StepProfile
from toolkit.units import format_bytes_in

__all__ = ["lines_of"]


def lines_of(profile: StepProfile) -> Iterator[str]:
    """Yield the table, the lines below it, and the advice."""
    last = profile.first_step + profile.steps - 1
    mesh = " x ".join(f"{name} {ranks}" for name, ranks in profile.mesh.items() if ranks > 1) or "one rank"
    yield f"steps {profile.first_step} to {last} on {profile.ranks} x {profile.device}, {mesh}; torch {profile.torch}"
    yield f"{'milliseconds of a step':24}{'mean':>10}{'share':>8}{'p50':>10}{'p95':>10}{'least rank':>16}{'most':>16}"
    for phase in profile.phases:
        yield _row(phase)
    yield _row(profile.step)
    yield f"{profile.tokens_per_s:,.0f} tokens/s of all ranks, {profile.tokens_per_step:,} tokens a step"
    if profile.overlap_s is not None:
        yield f"gradient communication overlapped with the backward pass for {1e3 * profile.overlap_s:.2f} ms per step"
    yield f"memory, at most: {_bytes(profile.peak_resident_bytes)} resident" + (
        f", {_bytes(profile.peak_device_bytes)} of a GPU" if profile.peak_device_bytes else ""
    )
    for other in profile.beside:
        yield f"beside the step: {other.name} in {other.thread}, {other.calls} times, {1e3 * other.total_s:.2f} ms in all"
    for words in profile.left_out:
        yield f"skipped: {words}"
    advice = advise(profile)
    yield "what to change:" if advice else "what to change: nothing; no phase is above its limit"
    for one in advice:
        yield f"- {one.line}"


def _row(phase: PhaseOverRanks) -> str:
    name = f"{phase.name}, exposed" if phase.name in WAITS else phase.name
    ranks = phase.ranks
    return (
        f"{name:24}{_ms(phase.mean_s)}{100 * phase.share:6.1f} %{_ms(phase.p50_s)}{_ms(phase.p95_s)}"
        f"{_ms(ranks.min)}{f' ({ranks.min_rank})':6}{_ms(ranks.max)}{f' ({ranks.max_rank})':6}"
    ).rstrip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:10.2f}"


def _bytes(peak: Spread) -> str:
    return f"{format_bytes_in(peak.max, 'MiB', digits=0)} (rank {peak.max_rank})"
