"""Settings of [train], [parallel] and [checkpoint] that exclude each other: rejected at submit or before a model is built."""

from __future__ import annotations

from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.parallel import ParallelTable
from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError


def check_combinations(train: TrainTable, parallel: ParallelTable) -> None:
    """Reject settings that the trainer does not support on such a mesh.

    Raises:
        ToolkitError: the message names the two settings.
    """
    if train.recompute == "selective" and parallel.pp > 1 and parallel.schedule == "zero_bubble":
        raise ToolkitError(
            'recompute = "selective" releases its activations in a single backward pass, but zero_bubble splits the backward pass in two',
            where="train.recompute",
            fix='use "every", or schedule = "interleaved"',
        )
    if train.compile and (parallel.tp > 1 or parallel.pp > 1):
        name = "tp" if parallel.tp > 1 else "pp"
        raise ToolkitError(
            f"{name} = {getattr(parallel, name)} and torch.compile cannot be combined: hooks break the graphs",
            where="train.compile",
            fix=f"set train.compile = false, or {name} = 1",
        )
    if train.lr_scaling == "adaptive":
        _check_adaptive(train, parallel)


def _check_adaptive(train: TrainTable, parallel: ParallelTable) -> None:
    if max(parallel.shard, parallel.tp, parallel.pp, parallel.cp) > 1:
        raise ToolkitError(
            "AdaScale reads the whole gradient of each micro-batch, which ranks with parts of a model do not have",
            where="train.lr_scaling",
            fix='use "linear" or "square_root", or only replicate the model',
        )
    if train.precision == "fp16":
        raise ToolkitError(
            "AdaScale reads the gradient of each micro-batch, which fp16 scales",
            where="train.lr_scaling",
            fix='use precision = "bf16"',
        )
    if train.batch < train.lr_reference_batch:
        raise ToolkitError(
            f"AdaScale requires a batch of at least lr_reference_batch = {train.lr_reference_batch}, got {train.batch}",
            where="train.lr_reference_batch",
            fix=f"set it to {train.batch} or less",
        )


def check_roll_back(train: TrainTable, checkpoint: CheckpointTable | None, *, has_one: bool) -> None:
    """Reject `guard = "roll_back"` if there would be no checkpoint to return to.

    Args:
        checkpoint: when the run saves; None if it cannot.
        has_one: whether the run has a checkpoint already.

    Raises:
        ToolkitError: the run saves no checkpoint before its end.
    """
    if train.guard != "roll_back" or has_one:
        return
    if checkpoint is None:
        raise ToolkitError(
            '"roll_back" returns to a checkpoint, but there is none without a run directory',
            where="train.guard",
            fix='start the job with `toolkit run` or `toolkit submit`, or set train.guard = "skip"',
        )
    saved_by = [checkpoint.every_steps, checkpoint.best_every_steps if checkpoint.best else 0]
    if checkpoint.every_s == 0 and not any(0 < steps < train.steps for steps in saved_by):
        raise ToolkitError(
            f'"roll_back" returns to a checkpoint, but none is scheduled before the last step: checkpoint.every_steps is '
            f"{checkpoint.every_steps}, train.steps {train.steps}",
            where="train.guard",
            fix=f'set checkpoint.every_steps from 1 to {train.steps - 1}, or train.guard = "skip"',
        )
