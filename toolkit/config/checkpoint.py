"""The table [checkpoint]: when a run saves its state, and which checkpoints it keeps."""

from typing import Literal

from pydantic import ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value


class CheckpointTable(Table):
    """When to save and what to keep. A run also saves when it is stopped and at its end, whatever is set here."""

    every_steps: int = key(200, "Steps between checkpoints; 0 disables saves by step.", ge=0)
    every_s: int = key(
        0, "Seconds between the end of one save and the next save (rank 0's clock); 0 disables saves by time.", ge=0
    )
    best: str = key(
        "",
        "Metric that triggers a save when it reaches a new best value: `loss` (the mean training loss since the last check), "
        "or a metric that the job measures. Empty disables such saves.",
    )
    best_mode: Literal["min", "max"] = key(
        "min", "With `best`: whether the smallest (`min`) or the largest (`max`) value of the metric is the best."
    )
    best_every_steps: int = key(100, "With `best`: steps between checks of the metric.", ge=1)
    on_failing_health: bool = key(
        True,
        "Save at once when less than 3 % of a node's memory, or of the job's memory limit on it, is free, or when a GPU "
        "reports memory errors. toolkit checks this once a minute and saves once per event.",
    )
    background: bool = key(
        False,
        "Copy the state to host memory and write the checkpoint while training continues; a step waits only for the copy. "
        "Off by default, because the copy needs host memory for the state of all ranks on the node, and because a failed "
        "save is reported some steps later. Ranks always wait for the save at a stop or at the end.",
    )
    when_busy: Literal["wait", "skip"] = key(
        "wait",
        "With `background`: what to do when a save is scheduled while the previous one is still being written. `wait` waits "
        "for the previous save; `skip` skips the new one. Skipped saves on request, for failing health or by `every_s` are "
        "retried at the next step, those by `every_steps` or `best` at their next scheduled step.",
    )
    on_error: Literal["end", "continue"] = key(
        "end",
        "What happens when a save fails. `end` fails the attempt at once, so that it does no work that it may not be able to "
        "save; `continue` logs the failure and retries at the next scheduled save. A failed save at a stop or at the end of "
        "the run always fails the attempt.",
    )
    keep_last: int = key(
        3,
        "Number of newest committed checkpoints to keep. The one that an attempt resumed from is kept until it ends.",
        ge=1,
    )
    keep_every: int = key(
        0, "Keep every checkpoint whose step is a multiple of this number forever; 0 disables this rule.", ge=0
    )
    keep_best: int = key(
        0, "With `best`: number of checkpoints with the best metric values to keep, in addition to the others.", ge=0
    )
    aggregate: Literal["rank", "node"] = key(
        "rank",
        "Write one shard file per rank or per node. Thousands of files per checkpoint can overload a file system.",
    )
    compression: Literal["none", "gzip", "zstd"] = key(
        "none",
        "Compression of tensors; a tensor that does not get smaller is stored uncompressed. `gzip` needs no package but is "
        'slow; `zstd` needs `toolkit[zstd]` where you submit and where ranks run. Both require `aggregate = "rank"`.',
    )
    source: str = key(
        "",
        "Checkpoint folder to start from. In the job file it is relative to that file, in --set to the current folder. Empty "
        "uses the newest valid checkpoint of the run. toolkit checks the folder before submission, unless the job waits for "
        "another job (`-d`), which may still write it.",
    )
    take: Literal["all", "weights"] = key(
        "all",
        "What to load from `source`: `all` of the state, or only the model `weights`, from which the run starts at step 0. "
        "Once the run has saved checkpoints of its own, it resumes from those in full instead.",
    )
    without: list[str] = key(
        None,
        'With `take = "weights"`: tensors or modules of the model, such as `head`, that are not loaded but keep their initial '
        "values. `source` may lack them. It must contain all other tensors of the model, with the same names and shapes.",
        form='a list of names such as ["head"]',
        default_factory=list,
    )

    @field_validator("best_mode", "best_every_steps", "keep_best")
    @classmethod
    def _check_has_metric(cls, value: int | str, info: ValidationInfo) -> int | str:
        if info.data.get("best") == "" and not _is_default(value, info):
            raise refuse_value(
                (), f"{value!r} has no effect without a metric", 'set checkpoint.best, for example best = "loss"'
            )
        return value

    @field_validator("when_busy")
    @classmethod
    def _busy_in_background(cls, when_busy: str, info: ValidationInfo) -> str:
        if info.data.get("background") is False and not _is_default(when_busy, info):
            raise refuse_value(
                (), f"{when_busy!r} has no effect without background saves", "set checkpoint.background to true"
            )
        return when_busy

    @field_validator("compression")
    @classmethod
    def _compressed_by_rank(cls, compression: str, info: ValidationInfo) -> str:
        if compression != "none" and info.data.get("aggregate") == "node":
            raise refuse_value((), "compression requires one shard file per rank", 'set checkpoint.aggregate to "rank"')
        return compression

    @field_validator("take")
    @classmethod
    def _weights_of_something(cls, take: str, info: ValidationInfo) -> str:
        if take == "weights" and not info.data.get("source"):
            raise refuse_value((), '"weights" requires a checkpoint to load the weights from', "set checkpoint.source")
        return take

    @field_validator("without")
    @classmethod
    def _without_of_weights(cls, without: list[str], info: ValidationInfo) -> list[str]:
        if without and info.data.get("take") == "all":
            raise refuse_value((), 'has no effect unless take = "weights"', 'set checkpoint.take to "weights"')
        return without


def _is_default(value: object, info: ValidationInfo) -> bool:
    """Return whether `value` is the default, which is allowed in any combination even if the file states it."""
    return info.field_name is not None and value == CheckpointTable.model_fields[info.field_name].default
