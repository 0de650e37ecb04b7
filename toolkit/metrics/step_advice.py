"""Advice, and the rules on the shares of a step, from a step profile or the windows of a run. Standard library only."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.metrics.limits import limit
from toolkit.metrics.step_profile import BUBBLE, CHECKPOINT, COMMUNICATION, DATA, OPTIMIZER, REST, WAITS, StepProfile
from toolkit.metrics.verdicts import Severity, severity_of

__all__ = ["Advice", "advise", "advise_on_shares", "less_communication"]


@dataclass(frozen=True)
class Advice:
    """A triggered rule. `said` explains the problem; `change` is the advice.

    value, limit: the number that triggered the rule, and the limit that it exceeds; 0 if the rule has none.
    evidence, source: the numbers behind the advice, and where they come from.
    gain: the expected share of the time, by `formula`. effort: "low", "medium" or "high".
    is_neutral: whether the change alters no result, except the rounding of sums over ranks.
    settings: what `--set` applies, such as "data.workers=4".
    """

    rule: str
    said: str
    change: str
    value: float = 0.0
    limit: float = 0.0
    severity: str = Severity.INFO
    evidence: dict[str, float] = field(default_factory=dict)
    source: str = "profile.json"
    gain: float = 0.0
    formula: str = ""
    effort: str = "medium"
    is_neutral: bool = False
    settings: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.said}: {self.change}"


# By phase: the limit, what takes the time, the usual change, and its effort.
_SHARES = {
    DATA: ("starvation.share", "waiting for samples takes",
           "raise data.workers if a Loader reads the samples, otherwise speed up `take_samples`", "low"),
    COMMUNICATION: ("advice.communication", "exposed communication takes", "", "medium"),
    BUBBLE: ("advice.bubble", "the bubble of the pipeline takes",
             "use more micro-batches: a larger train.batch or a smaller train.micro_batch; try parallel.schedule = "
             '"interleaved" or "zero_bubble", or fewer parallel.pp stages', "medium"),
    OPTIMIZER: ("advice.optimizer", "the optimizer takes", "use a larger train.batch and fewer steps", "medium"),
    CHECKPOINT: ("save.share", "saving takes", "raise checkpoint.every_steps, or set checkpoint.background = true", "low"),
    REST: ("advice.rest", "time outside of phases takes",
           "raise train.log_every, and check the code that processes the records", "low"),
}  # fmt: skip


def advise(profile: StepProfile) -> tuple[Advice, ...]:
    """Return the triggered rules, the most expensive first."""
    settings = profile.settings
    has_passes = settings.micro_batch > 0 and settings.passes > 1
    changes = {COMMUNICATION: less_communication(profile.mesh, profile.nodes, has_passes=has_passes)}
    if settings.fused is False:
        changes[OPTIMIZER] = "create the optimizer with fused=True, or use a larger train.batch and fewer steps"
    of_phases = {name: profile.share(name) for name in _SHARES}
    of_phases[COMMUNICATION] = sum(map(profile.share, WAITS))
    if (
        profile.mesh.get("pp", 1) > 1
    ):  # at the end of a step, all stages wait for the first one, which only communicates
        least_s = sum(phase.ranks.min for phase in profile.phases if phase.name in WAITS)
        drained = of_phases[COMMUNICATION] - least_s / profile.step.mean_s
        of_phases[COMMUNICATION] -= drained
        of_phases[BUBBLE] += drained
    shares = advise_on_shares(of_phases, {}, changes)
    found = [*_late(profile), *shares, *_small_passes(profile), *_unsteady(profile)]
    order = {"unsteady": 2, "small passes": 1}
    return tuple(sorted(found, key=lambda advice: (order.get(advice.rule, 0), -advice.value)))


def advise_on_shares(
    shares: Mapping[str, float], keys: Mapping[str, Any], changes: Mapping[str, str]
) -> Iterator[Advice]:
    """Yield advice on phases whose share of the step exceeds its limit, with the setting that `keys` of the job suggest.

    `changes` has what to change instead of the usual, by phase.
    """
    for name, (limit_name, said, usual, effort) in _SHARES.items():
        share, most = shares.get(name, 0.0), limit(limit_name)
        if share > most:
            advice = Advice(
                name, f"{said} {_percent(share)} of the step (limit {_percent(most)})", changes.get(name, usual), share,
                most, severity_of(share), {f"{name}_share": share}, gain=share, formula="at most the share", effort=effort,
            )  # fmt: skip
            setting, gain, formula = _setting(name, share, keys)
            yield (
                replace(advice, settings=(setting,), is_neutral=True, gain=gain, formula=formula) if setting else advice
            )


def _setting(phase: str, share: float, keys: Mapping[str, Any]) -> tuple[str, float, str]:
    """Return a setting that alters no result, its expected gain and the formula of the gain; "" if there is none."""
    workers, every = keys.get("data.workers"), keys.get("train.log_every")
    if phase == DATA and workers is not None:
        now = 4 if workers == "auto" else int(workers)  # `auto` tries at most 4
        more = min(256, max(2, 2 * now))
        if now:
            return f"data.workers={more}", min(share, 1 - now / more), f"min(share, 1 - {now}/{more})"
        return f"data.workers={more}", 1 - max(1 - share, share / more), f"1 - max(1 - share, share / {more})"
    if phase == REST and every is not None:
        return f"train.log_every={10 * every}", 0.9 * share, "at most share x (1 - 1/10)"
    if phase == CHECKPOINT and keys.get("checkpoint.background") is False:
        return "checkpoint.background=true", share, "at most the share"
    if phase == COMMUNICATION and keys.get("parallel.reduction") == "flat":
        return "parallel.reduction=auto", share, "at most the share"
    if phase == COMMUNICATION and keys.get("parallel.bucket_mb", "measured") not in ("measured", "planned"):
        return "parallel.bucket_mb=measured", share, "at most the share"
    return "", 0.0, ""


def _late(profile: StepProfile) -> Iterator[Advice]:
    work, most = profile.work, limit("advice.late")
    behind_s = work.max - (work.min if profile.ranks == 2 else work.median)
    share = behind_s / profile.step.mean_s
    if share > most:
        own = [phase for phase in profile.phases if phase.name not in (*WAITS, BUBBLE)]
        phase = max(own, key=lambda phase: phase.ranks.max - phase.ranks.min)
        yield Advice(
            "late rank",
            f"rank {work.max_rank} works {1e3 * behind_s:.2f} ms per step longer than the others, {_percent(share)} of "
            f"the step (limit {_percent(most)}), most of it in {phase.name}",
            "start with this rank, because the others wait for it; run `toolkit topo check` on its node",
            share, most, severity_of(share), {"late_share": share}, gain=share, formula="the share",
        )  # fmt: skip


def less_communication(mesh: Mapping[str, int], nodes: int, *, has_passes: bool, is_compressed: bool = False) -> str:
    """Return what to try, given whether a step has several micro-batches, and whether ranks compress gradients."""
    ways = []
    if mesh.get("tp", 1) > 1:
        ways.append("fewer parallel.tp ranks, or keep them on one node")
    if mesh.get("shard", 1) > 1:
        ways.append("a smaller parallel.zero, which gathers less often, if memory allows it")
    elif nodes > 1 and mesh.get("replicate", 1) > 1 and not is_compressed:
        ways.append('parallel.reduction = "hierarchical" or, on the CPU, "measured"')
        if math.prod(mesh.get(name, 1) for name in ("tp", "pp", "cp", "ep")) == 1:
            ways.append('gradient_compression.algorithm = "auto" on links of a few Gbit/s or less')
    if has_passes and mesh.get("pp", 1) == 1:  # fewer micro-batches would enlarge the bubble of a pipeline
        ways.append("a larger train.micro_batch")
    ways.append("a larger train.batch, for more samples per gradient reduction")
    return "try " + "; ".join(ways)


def _small_passes(profile: StepProfile) -> Iterator[Advice]:
    passes, ranks = profile.settings.passes, profile.mesh.get("replicate", 1) * profile.mesh.get("shard", 1)
    # A single pass already has all samples of the rank, and a pipeline needs many.
    if profile.device != "cpu" or passes < 2 or profile.mesh.get("pp", 1) > 1:
        return
    tokens, fewest = profile.tokens_per_step // (passes * ranks), int(limit("advice.pass_tokens"))
    if tokens < fewest:
        yield Advice(
            "small passes", f"a micro-batch has {tokens} tokens (limit {fewest}), so kernel calls dominate its time",
            f"raise train.micro_batch, which is {profile.settings.micro_batch}: a step has {passes} micro-batches",
            tokens, fewest, effort="low",
        )  # fmt: skip


def _unsteady(profile: StepProfile) -> Iterator[Advice]:
    step, most = profile.step, limit("advice.unsteady")
    ratio = step.p95_s / step.p50_s if step.p50_s else 0.0
    if profile.steps >= limit("advice.steady_steps") and ratio > most:
        yield Advice(
            "unsteady", f"one step in twenty takes {ratio:.1f} times as long as the median step (limit {most:g})",
            "other processes probably use the CPUs: trust p50 rather than means, and measure on an idle node", ratio, most,
        )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
