"""The table [checkpoint]: when the state is saved, and which saves are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value


class CheckpointTable(Table):
    """Saves at stop and at the end are made whatever stands here."""

    every_steps: int = key(200, "Steps between checkpoints; 0 counts no steps.", ge=0)
    every_s: int = key(0, "Seconds from the end of any save to the next one, by rank 0's clock; 0 disables it.", ge=0)
    best: str = key(
        "",
        "Metric whose new best is saved at once: `loss`, the mean training loss since the look before, or one that the "
        "job measures. Empty measures none.",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "With `best`: whether the smallest or the largest value of the metric is the best."
    )
    best_every_steps: int = key(100, "With `best`: steps between two checks of the metric.", ge=1)
    on_failing_health: bool = key(
        True,
        "Save at once when less than 3 % of the memory of a node or of the job on it is left, or when a GPU's memory "
        "begins to fail; looked at once a minute, saved once for each sign.",
    )
    background: bool = key(
        False,
        "Train on while a save is written, from a copy of the state: steps wait for the copy alone. Off by default, since "
        "the copy takes as much of the node's memory again as its ranks' part of the state, and a failure is heard of some "
        "steps later. The run always waits for a save at a stop or at the end.",
    )
    when_busy: Literal["wait", "skip"] = key(
        "wait",
        "With `background`, if the previous save is still being written when the next one is required: wait, or skip the next "
        "one. A request, failing health and `every_s` come again at the next step, `every_steps` and `best` when they are "
        "next due.",
    )
    on_error: Literal["end", "continue"] = key(
        "end",
        "What follows a failed save. `end` fails the attempt at once, so that it does not compute for hours what cannot "
        "be saved; `continue` logs it and retries at the next save. A failed save at a stop or at the end always "
        "fails the attempt.",
    )
    keep_last: int = key(
        3,
        "Newest committed checkpoints that are kept. The one that an attempt began from stays beside them until it ends.",
        ge=1,
    )
    keep_every: int = key(0, "Keep the checkpoint of every N-th step forever; 0 disables it.", ge=0)
    keep_best: int = key(
        0, "With `best`: checkpoints with the best values of the metric that are kept, beside the others.", ge=0
    )
    aggregate: Literal["rank", "node"] = key(
        "rank", "A shard file for each rank, or one for each node: thousands of files are a burden to a file system."
    )
    compression: Literal["none", "gzip", "zstd"] = key(
        "none",
        "Of the tensors; what does not shrink stays as it is. `gzip` needs nothing and is slow, `zstd` needs "
        "`toolkit[zstd]` where the job is submitted and where ranks run. Goes with a shard file for each rank alone.",
    )
    source: str = key(
        "",
        "Checkpoint folder to begin from, relative to the job file, or in --set to the current folder; empty takes the "
        "run's newest that verifies. It is looked at before the job is submitted, unless that waits for another (`-d`).",
    )
    take: Literal["all", "weights"] = key(
        "all",
        "What is taken from `source`: everything, or the model's tensors alone, with which a new run begins at step 0. "
        "What the run itself has saved since comes first, with everything.",
    )
    without: list[str] = key(
        None,
        'With `take = "weights"`: tensors or modules of the model, such as `head`, that stay as the job makes them; '
        "`source` may lack them, or hold others. Everything else must be there, by name and shape.",
        form='a list of names such as ["head"]',
        default_factory=list,
    )

    @field_validator("best_mode", "best_every_steps", "keep_best")
    @classmethod
    def _of_a_metric(cls, value: int | str, info: ValidationInfo) -> int | str:
        if info.data.get("best") == "" and not _is_default(value, info):
            raise refuse_value(
                (), f"{value!r} says nothing where no metric is named", 'set checkpoint.best, as in best = "loss"'
            )
        return value

    @field_validator("when_busy")
    @classmethod
    def _busy_in_background(cls, when_busy: str, info: ValidationInfo) -> str:
        if info.data.get("background") is False and not _is_default(when_busy, info):
            raise refuse_value(
                (), f"{when_busy!r} says nothing where steps wait for each save", "set checkpoint.background to true"
            )
        return when_busy

    @field_validator("compression")
    @classmethod
    def _compressed_by_rank(cls, compression: str, info: ValidationInfo) -> str:
        if compression != "none" and info.data.get("aggregate") == "node":
            raise refuse_value((), "goes with a shard file for each rank alone", 'set checkpoint.aggregate to "rank"')
        return compression

    @field_validator("take")
    @classmethod
    def _weights_of_something(cls, take: str, info: ValidationInfo) -> str:
        if take == "weights" and not info.data.get("source"):
            raise refuse_value((), '"weights" needs a checkpoint to take them from', "set checkpoint.source")
        return take

    @field_validator("without")
    @classmethod
    def _without_of_weights(cls, without: list[str], info: ValidationInfo) -> list[str]:
        if without and info.data.get("take") == "all":
            raise refuse_value((), "is for weights alone", 'set checkpoint.take to "weights"')
        return without


def _is_default(value: object, info: ValidationInfo) -> bool:
    """A default that is written explicitly requests nothing, whatever other keys are set."""
    return info.field_name is not None and value == CheckpointTable.model_fields[info.field_name].default
