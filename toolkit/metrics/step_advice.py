"""Advice from the step profile: rules, each with the limit that triggers it. Standard library only."""

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.metrics.step_profile import CHECKPOINT, COMMUNICATION, DATA, OPTIMIZER, REST, StepProfile

__all__ = ["advise"]

# Fractions of the step time.
DATA_LIMIT = 0.10
COMMUNICATION_LIMIT = 0.20
OPTIMIZER_LIMIT = 0.10
CHECKPOINT_LIMIT = 0.05
REST_LIMIT = 0.10
LATE_LIMIT = 0.10  # how much longer the slowest rank works than the median rank
UNSTEADY_LIMIT = 2.0  # ratio of the 95th percentile of step times to their median
FEWEST_STEADY_STEPS = 20  # fewer steps are too few for a percentile
FEWEST_TOKENS = 256  # tokens per forward and backward pass on the CPU, measured by benchmarks/pass_size.py


@dataclass(frozen=True)
class Advice:
    """A triggered rule, whose `value` exceeds its `limit`. `said` explains the problem; `change` is the advice."""

    rule: str
    value: float
    limit: float
    said: str
    change: str

    @property
    def line(self) -> str:
        return f"{self.said}: {self.change}"


def advise(profile: StepProfile) -> tuple[Advice, ...]:
    """Return the triggered rules, the most expensive first."""
    found = [*_late(profile), *_shares(profile), *_small_passes(profile), *_unsteady(profile)]
    order = {"unsteady": 2, "small passes": 1}
    return tuple(sorted(found, key=lambda advice: (order.get(advice.rule, 0), -advice.value)))


def _late(profile: StepProfile) -> Iterator[Advice]:
    work = profile.work
    usual_s = work.min if profile.ranks == 2 else work.median
    behind_s = work.max - usual_s
    share = behind_s / profile.step.mean_s
    if share > LATE_LIMIT:
        own = [phase for phase in profile.phases if phase.name != COMMUNICATION]
        most = max(own, key=lambda phase: phase.ranks.max - phase.ranks.min)
        yield Advice(
            "late rank", share, LATE_LIMIT,
            f"rank {work.max_rank} works {1e3 * behind_s:.2f} ms per step longer than the others, {_percent(share)} of "
            f"the step (limit {_percent(LATE_LIMIT)}), most of it in {most.name}",
            "start with this rank, because the others wait for it; run `toolkit topo check` on its node",
        )  # fmt: skip


def _shares(profile: StepProfile) -> Iterator[Advice]:
    limits = {
        DATA: DATA_LIMIT, COMMUNICATION: COMMUNICATION_LIMIT, OPTIMIZER: OPTIMIZER_LIMIT, CHECKPOINT: CHECKPOINT_LIMIT,
        REST: REST_LIMIT,
    }  # fmt: skip
    what = {
        DATA: "waiting for samples takes",
        COMMUNICATION: "exposed communication takes",
        OPTIMIZER: "the optimizer takes",
        CHECKPOINT: "saving takes",
        REST: "time outside of phases takes",
    }
    for name, limit in limits.items():
        share = profile.share(name)
        if share > limit:
            said = f"{what[name]} {_percent(share)} of the step (limit {_percent(limit)})"
            yield Advice(name, share, limit, said, _change(profile, name))


def _change(profile: StepProfile, name: str) -> str:
    if name == COMMUNICATION:
        return _less_communication(profile)
    if name == OPTIMIZER:
        if profile.settings.fused is False:
            return "create the optimizer with fused=True, or use a larger train.batch and fewer steps"
        return "use a larger train.batch and fewer steps"
    return {
        DATA: "raise data.workers if a Loader reads the samples, otherwise speed up `take_samples`",
        CHECKPOINT: "raise checkpoint.every_steps, or set checkpoint.background = true",
        REST: "raise train.log_every, and check the code that processes the records",
    }[name]


def _less_communication(profile: StepProfile) -> str:
    mesh, ways = profile.mesh, []
    if mesh.get("tp", 1) > 1:
        ways.append("fewer parallel.tp ranks, or keep them on one node")
    if mesh.get("shard", 1) > 1:
        ways.append("a smaller parallel.zero, which gathers less often, if memory allows it")
    elif profile.nodes > 1 and mesh.get("replicate", 1) > 1:
        ways.append('parallel.reduction = "hierarchical" or, on the CPU, "measured"')
    if profile.settings.micro_batch and profile.settings.passes > 1:
        ways.append("a larger train.micro_batch")
    ways.append("a larger train.batch, for more samples per gradient reduction")
    return "try " + "; ".join(ways)


def _small_passes(profile: StepProfile) -> Iterator[Advice]:
    passes, ranks = profile.settings.passes, profile.mesh.get("replicate", 1) * profile.mesh.get("shard", 1)
    if profile.device != "cpu" or passes < 2:  # a single pass already has all samples of the rank
        return
    tokens = profile.tokens_per_step // (passes * ranks)
    if tokens < FEWEST_TOKENS:
        yield Advice(
            "small passes", tokens, FEWEST_TOKENS,
            f"a micro-batch has {tokens} tokens (limit {FEWEST_TOKENS}), so kernel calls dominate its time",
            f"raise train.micro_batch, which is {profile.settings.micro_batch}: a step has {passes} micro-batches",
        )  # fmt: skip


def _unsteady(profile: StepProfile) -> Iterator[Advice]:
    step = profile.step
    ratio = step.p95_s / step.p50_s if step.p50_s else 0.0
    if profile.steps >= FEWEST_STEADY_STEPS and ratio > UNSTEADY_LIMIT:
        yield Advice(
            "unsteady", ratio, UNSTEADY_LIMIT,
            f"one step in twenty takes {ratio:.1f} times as long as the median step (limit {UNSTEADY_LIMIT:g})",
            "other processes probably use the CPUs: trust p50 rather than means, and measure on an idle node",
        )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
