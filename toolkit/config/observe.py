"""The table [observe]: what toolkit records about the steps of a run."""

from typing import Annotated, Literal

from pydantic import StringConstraints, field_validator

from toolkit.config.presets import preset
from toolkit.config.table import Table, key, refuse_value
from toolkit.metrics.windows import MEASURED, METRIC_NAME, MOST_USER_METRICS

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
        return preset(patterns, "step_line") if isinstance(patterns, str) else patterns

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
