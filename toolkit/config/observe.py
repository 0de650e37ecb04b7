"""The table [observe]: what toolkit records about the steps of a run."""

import re
from typing import Annotated, Literal, Self

from pydantic import StringConstraints, field_validator, model_validator

from toolkit.config.presets import preset
from toolkit.config.table import Table, key, refuse_value
from toolkit.metrics.windows import COLUMNS, MEASURED, METRIC_NAME, MOST_USER_METRICS, printed_metrics

__all__ = ["ObserveTable"]

_Metric = Annotated[str, StringConstraints(pattern=f"^{METRIC_NAME}(:mean)?$")]


class ObserveTable(Table):
    """What toolkit records while a run is active."""

    record: bool = key(
        True,
        "Record the time of each step on every rank, in shared memory on its node. It costs 2 to 25 microseconds of processor "
        "time per step.",
    )
    metrics: list[_Metric] = key(
        None,
        "Metrics of `toolkit.record` for rules of alerts; they and all views use the value of rank 0, or, with `:mean`, the mean over ranks.",
        form=f'a list of up to {MOST_USER_METRICS} names such as ["reward", "acc:mean"]',
        max_length=MOST_USER_METRICS,
        default_factory=list,
    )

    step_line: str | list[str] = key(
        None,
        "Regular expressions that read steps and metrics from the lines that rank 0 prints: the groups `step` and `total` are the "
        "step and the number of steps, other named groups are metrics. A metric without a step belongs to the last step.",
        form="a list such as ['iter (?P<step>\\d+): loss (?P<loss>\\S+)'], or the name of a preset",
        default_factory=list,
    )

    trackers: list[Literal["wandb", "mlflow", "tensorboard"]] = key(
        None,
        "Trackers that a process on the first node sends the metrics to during the run, which never waits for it. Their servers "
        "and keys come from variables such as WANDB_API_KEY and MLFLOW_TRACKING_URI in `[env]`: docs/metrics.md.",
        form='a list of "wandb", "mlflow" and "tensorboard"',
        default_factory=list,
    )

    @field_validator("step_line")
    @classmethod
    def _expand_step_line(cls, patterns: str | list[str]) -> list[str]:
        if isinstance(patterns, str):
            return preset(patterns, "step_line")
        example = r"write a group such as (?P<step>\d+) or (?P<loss>\S+)"
        groups: set[str] = set()
        for number, pattern in enumerate(patterns, start=1):
            try:
                names = re.compile(pattern).groupindex
            except re.error as error:
                problem = f"pattern {number}, {pattern!r}, is not a regular expression: {error}"
                raise refuse_value((), problem, "correct it; in TOML, write patterns in single quotes") from None
            if not names:
                raise refuse_value((), f"pattern {number}, {pattern!r}, has no named group", example)
            for name in names:
                if name in MEASURED:
                    raise refuse_value((), f"toolkit measures {name} itself", f"use another name for the group {name}")
                if len(name) > 63 or not name.isascii():
                    what = f"{name[:80]} is not a valid name of a metric"
                    raise refuse_value((), what, "use up to 63 of A-Z a-z 0-9 _")
            groups.update(names)
        if patterns and "step" not in groups:
            raise refuse_value((), "no pattern has the group `step`", example)
        return patterns

    @field_validator("metrics")
    @classmethod
    def _check_names(cls, metrics: list[str]) -> list[str]:
        names = [one.removesuffix(":mean") for one in metrics]
        for name in names:
            if name in MEASURED:
                raise refuse_value((), f"toolkit measures {name} itself", f"remove {name}: rules can read it")
            if names.count(name) > 1:
                raise refuse_value((), f"{name} occurs more than once", f"keep one of {name} and {name}:mean")
        return metrics

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        names = {one.removesuffix(":mean") for one in self.metrics} | set(printed_metrics(self.step_line))
        own = sorted(names - {*COLUMNS})
        if len(own) > MOST_USER_METRICS:
            what = f"expected up to {MOST_USER_METRICS} metrics with those in metrics, got {len(own)}: {', '.join(own)}"
            raise refuse_value(("step_line",), what, "remove some of them")
        return self
