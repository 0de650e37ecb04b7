"""Which settings of [train], [parallel] and [checkpoint] do not go together: refused at submit or before a model is built."""

from __future__ import annotations

from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.parallel import ParallelTable
from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError


def check_combinations(train: TrainTable, parallel: ParallelTable) -> None:
    """Refuse what the trainer cannot do on such a mesh.

    Raises:
        ToolkitError: naming the two settings.
    """
    if train.recompute == "selective" and parallel.pp > 1 and parallel.schedule == "zero_bubble":
        raise ToolkitError(
            'recompute = "selective" releases its memory in one backward pass, but zero_bubble splits that pass in two',
            where="train.recompute",
            fix='take "every", or schedule = "interleaved"',
        )
    if train.compile and (parallel.tp > 1 or parallel.pp > 1):
        name = "tp" if parallel.tp > 1 else "pp"
        raise ToolkitError(
            f"{name} = {getattr(parallel, name)} and torch.compile do not go together: hooks part the graphs",
            where="train.compile",
            fix=f"set train.compile = false, or {name} = 1",
        )
    if train.lr_scaling == "adaptive":
        _check_adaptive(train, parallel)


def _check_adaptive(train: TrainTable, parallel: ParallelTable) -> None:
    if max(parallel.shard, parallel.tp, parallel.pp, parallel.cp) > 1:
        raise ToolkitError(
            "AdaScale reads the gradient of each micro-batch, which ranks with parts of a model do not have",
            where="train.lr_scaling",
            fix='take "linear" or "square_root", or copies of the model alone',
        )
    if train.precision == "fp16":
        raise ToolkitError(
            "AdaScale reads the gradient of each micro-batch, which fp16 scales",
            where="train.lr_scaling",
            fix='take precision = "bf16"',
        )
    if train.batch < train.lr_reference_batch:
        raise ToolkitError(
            f"AdaScale is for a batch of at least the reference's, {train.lr_reference_batch}, and this one is {train.batch}",
            where="train.lr_reference_batch",
            fix=f"set it to {train.batch} or less",
        )


def check_roll_back(train: TrainTable, checkpoint: CheckpointTable | None, *, has_one: bool) -> None:
    """Refuse a guard that could never go back.

    Args:
        checkpoint: when the run saves; None where it cannot.
        has_one: whether the run has a checkpoint already.

    Raises:
        ToolkitError: no checkpoint comes before the end.
    """
    if train.guard != "roll_back" or has_one:
        return
    if checkpoint is None:
        raise ToolkitError(
            '"roll_back" goes back to a checkpoint, and without a run directory there is none',
            where="train.guard",
            fix='start the job with `toolkit run` or `toolkit submit`, or set train.guard = "skip"',
        )
    saved_by = [checkpoint.every_steps, checkpoint.best_every_steps if checkpoint.best else 0]
    if checkpoint.every_s == 0 and not any(0 < steps < train.steps for steps in saved_by):
        raise ToolkitError(
            f'"roll_back" needs a checkpoint, but none is saved before the last step: checkpoint.every_steps is '
            f"{checkpoint.every_steps}, train.steps {train.steps}",
            where="train.guard",
            fix=f'set checkpoint.every_steps from 1 to {train.steps - 1}, or train.guard = "skip"',
        )
