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
    """Return the factor of the reference's learning rate.

    `linear`: Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677, section 2.1; for SGD. `square_root` keeps
    the variance of an update: Krizhevsky, One weird trick, arXiv 1404.5997; for Adam: Malladi et al., arXiv 2205.10287.
    `adaptive` starts at 1, because its gain is measured at each step.
    """
    if rule in ("none", "adaptive"):
        return 1.0
    ratio = batch / _checked(reference_batch, rule)
    return ratio if rule == "linear" else math.sqrt(ratio)


def schedule_of(settings: RateSettings) -> Schedule | AdaScale:
    """Return the learning-rate schedule that [train] requests.

    A rate that `linear` increases warms up from the reference's own rate (Goyal et al., section 2.2): a warmup from 0
    would be spent below rates that are known to work.
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
            f"the rule {rule!r} needs the batch for which the learning rate was found",
            where="train.lr_reference_batch",
            fix="set it to that batch",
        )
    return reference_batch
