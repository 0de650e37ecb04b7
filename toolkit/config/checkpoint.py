"""The table [checkpoint]: when the state is saved, and which saves are kept."""

from typing import Literal

from pydantic import ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value


class CheckpointTable(Table):
    """Saves at a stop and at the end are independent of this table."""

    every_steps: int = key(200, "Steps between checkpoints; 0 disables saves by step.", ge=0)
    every_s: int = key(
        0, "Seconds from the end of any save to the next one, by rank 0's clock; 0 disables saves by time.", ge=0
    )
    best: str = key(
        "",
        "Metric whose new best value is saved at once: `loss`, the mean training loss since the last check, or one that the "
        "job measures. Empty disables it.",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "With `best`: whether the smallest or the largest value of the metric is the best."
    )
    best_every_steps: int = key(100, "With `best`: steps between two checks of the metric.", ge=1)
    on_failing_health: bool = key(
        True,
        "Save at once when less than 3 % of the memory of a node, or of the job on it, is free, or when a GPU's memory "
        "reports errors; checked once a minute, with one save for each event.",
    )
    background: bool = key(
        False,
        "Continue training while a save is written from a copy of the state: steps wait only for the copy. Off by default, "
        "since the copy needs as much of the node's memory as its ranks' part of the state, and a failed save is reported "
        "some steps later. Ranks always wait for a save at a stop or at the end.",
    )
    when_busy: Literal["wait", "skip"] = key(
        "wait",
        "With `background`, if a save is scheduled while the previous one is still being written: wait for that, or skip "
        "this one. Requests, failing health and `every_s` retry at the next step, `every_steps` and `best` at their next "
        "scheduled step.",
    )
    on_error: Literal["end", "continue"] = key(
        "end",
        "The effect of a failed save. `end` fails the attempt at once, so that no work is done that may not be saved; "
        "`continue` logs the failure and tries again at the next scheduled save. A failed save at a stop or at the end "
        "always fails the attempt.",
    )
    keep_last: int = key(
        3,
        "Number of newest committed checkpoints to keep. The one that an attempt started from is also kept until it ends.",
        ge=1,
    )
    keep_every: int = key(
        0, "Keep the checkpoints at every multiple of this number of steps forever; 0 keeps none for this reason.", ge=0
    )
    keep_best: int = key(
        0,
        "With `best`: number of checkpoints with the best values of the metric to keep, in addition to the others.",
        ge=0,
    )
    aggregate: Literal["rank", "node"] = key(
        "rank", "One shard file per rank, or one per node: thousands of files are a load on a file system."
    )
    compression: Literal["none", "gzip", "zstd"] = key(
        "none",
        "Compression of the tensors; those that do not shrink are stored as they are. `gzip` needs no package and is slow, "
        "`zstd` needs `toolkit[zstd]` at submission and on the ranks. Requires one shard file per rank.",
    )
    source: str = key(
        "",
        "Checkpoint folder to start from, relative to the job file, or in --set to the current folder; empty uses the "
        "run's newest valid one. It is checked before submission, unless the job waits for another one (`-d`).",
    )
    take: Literal["all", "weights"] = key(
        "all",
        "What to load from `source`: everything, or only the model's tensors, with which a new run starts at step 0. "
        "Checkpoints that the run itself has saved since take precedence, and are loaded in full.",
    )
    without: list[str] = key(
        None,
        'With `take = "weights"`: tensors or modules of the model, such as `head`, that keep the job\'s own initial values; '
        "`source` may lack them, or contain others. All others must be in it, with the same name and shape.",
        form='a list of names such as ["head"]',
        default_factory=list,
    )

    @field_validator("best_mode", "best_every_steps", "keep_best")
    @classmethod
    def _of_a_metric(cls, value: int | str, info: ValidationInfo) -> int | str:
        if info.data.get("best") == "" and not _is_default(value, info):
            raise refuse_value(
                (), f"{value!r} has no effect without a metric", 'set checkpoint.best, as in best = "loss"'
            )
        return value

    @field_validator("when_busy")
    @classmethod
    def _busy_in_background(cls, when_busy: str, info: ValidationInfo) -> str:
        if info.data.get("background") is False and not _is_default(when_busy, info):
            raise refuse_value(
                (), f"{when_busy!r} has no effect if steps wait for each save", "set checkpoint.background to true"
            )
        return when_busy

    @field_validator("compression")
    @classmethod
    def _compressed_by_rank(cls, compression: str, info: ValidationInfo) -> str:
        if compression != "none" and info.data.get("aggregate") == "node":
            raise refuse_value((), "requires one shard file per rank", 'set checkpoint.aggregate to "rank"')
        return compression

    @field_validator("take")
    @classmethod
    def _weights_of_something(cls, take: str, info: ValidationInfo) -> str:
        if take == "weights" and not info.data.get("source"):
            raise refuse_value((), '"weights" needs a checkpoint to load them from', "set checkpoint.source")
        return take

    @field_validator("without")
    @classmethod
    def _without_of_weights(cls, without: list[str], info: ValidationInfo) -> list[str]:
        if without and info.data.get("take") == "all":
            raise refuse_value((), "has an effect only on weights", 'set checkpoint.take to "weights"')
        return without


def _is_default(value: object, info: ValidationInfo) -> bool:
    """True for a default that is written out, which has no effect in any combination."""
    return info.field_name is not None and value == CheckpointTable.model_fields[info.field_name].default
