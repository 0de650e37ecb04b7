"""Scale a learning rate from a reference batch to the job's batch, and create the schedule of [train]."""

import math
from typing import Any, Literal, Protocol

from toolkit.errors import ToolkitError
from toolkit.train.optim.adascale import AdaScale
from toolkit.train.schedule import Course, Schedule

Rule = Literal["none", "linear", "square_root", "adaptive"]


class LearningRate(Protocol):
    """The interface of `Schedule` and `AdaScale`."""

    def rate(self) -> float: ...

    def advance(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RateSettings(Protocol):
    """The keys of `[train]` that a schedule uses."""

    steps: int
    batch: int
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    schedule: Course
    lr_scaling: Rule
    lr_reference_batch: int


def rate_factor(rule: Rule, batch: int, reference_batch: int) -> float:
    """Return the factor by which the rule multiplies the learning rate of the reference batch.

    `linear`: Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677, section 2.1; for SGD. `square_root` keeps
    the variance of an update: Krizhevsky, One weird trick, arXiv 1404.5997; for Adam: Malladi et al., arXiv 2205.10287.
    `adaptive` starts at 1, because its gain is measured at each step.
    """
    if rule in ("none", "adaptive"):
        return 1.0
    ratio = batch / _checked(reference_batch, rule)
    return ratio if rule == "linear" else math.sqrt(ratio)


def schedule_of(settings: RateSettings) -> Schedule | AdaScale:
    """Return the learning-rate schedule that [train] configures.

    If `linear` increases the rate, the warmup starts at the rate of the reference batch instead of 0 (Goyal et al.,
    section 2.2), because lower rates are known to work without a warmup.
    """
    rule = settings.lr_scaling
    peak = settings.lr * rate_factor(rule, settings.batch, settings.lr_reference_batch)
    start = settings.lr if rule == "linear" and peak > settings.lr else 0.0
    schedule = Schedule(
        peak, settings.steps, settings.warmup_steps, settings.min_lr_ratio, settings.schedule, start=start
    )
    if rule != "adaptive":
        return schedule
    return AdaScale(schedule, settings.batch / _checked(settings.lr_reference_batch, rule))


def _checked(reference_batch: int, rule: Rule) -> int:
    if reference_batch < 1:
        raise ToolkitError(
            f"train.lr_scaling = {rule!r} requires the batch size for which the learning rate was tuned",
            where="train.lr_reference_batch",
            fix="set train.lr_reference_batch to that batch size",
        )
    return reference_batch
