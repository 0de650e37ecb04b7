"""The table [local_sgd]: replicas that exchange parameters every few steps instead of gradients, and what that excludes."""

from typing import TYPE_CHECKING, Literal

from toolkit.config.table import Table, key
from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob

__all__ = ["LocalSgdTable", "check_local_sgd"]

_OF_DDP = ("reduction", "bucket_mb", "overlap", "unused_parameters")


class LocalSgdTable(Table):
    """Parameters that replicas exchange every few steps, instead of gradients at each step (docs/compression.md)."""

    algorithm: Literal["none", "average", "diloco"] = key(
        "none",
        "`average`: replicas continue from the mean of their parameters. `diloco`: from an outer step of SGD with Nesterov momentum "
        "along the mean change of their parameters. `none`: replicas exchange gradients at each step.",
    )
    every: int = key(10, "Steps between two exchanges of a parameter.", ge=1)
    fragments: int = key(
        1, "Groups of parameters of about equal size, exchanged `every / fragments` steps apart; at most `every`.", ge=1
    )
    outer_lr: float = key(0.7, "Learning rate of the outer steps of `diloco`.", gt=0)
    outer_momentum: float = key(0.9, "Nesterov momentum of the outer steps of `diloco`.", ge=0, lt=1)


def check_local_sgd(resolved: "ResolvedJob") -> None:
    """Raise a ToolkitError for settings that cannot be combined with local SGD."""
    if resolved.local_sgd.algorithm == "none":
        return
    parallel = resolved.parallel
    for name in ("shard", "tp", "pp", "ep", "cp"):
        if (size := getattr(parallel, name)) > 1:
            message = f"local SGD requires a whole model on every rank, but with {name} = {size} ranks share one"
            raise ToolkitError(message, where=f"parallel.{name}", fix=f"set {name} = 1")
    for name in _OF_DDP:
        if (value := getattr(parallel, name)) != ParallelTable.model_fields[name].default:
            message = f"{name} = {value} has no effect with [local_sgd], which exchanges no gradients"
            raise ToolkitError(message, where=f"parallel.{name}", fix="remove it")
    for where, is_met, message, fix in _exclusions(resolved):
        if is_met:
            raise ToolkitError(message, where=where, fix=fix)


def _exclusions(resolved: "ResolvedJob") -> list[tuple[str, bool, str, str]]:
    """Return (key, whether the job has the combination, message, fix)."""
    table, train, compression = resolved.local_sgd, resolved.train, resolved.gradient_compression
    every, checked, offloaded = table.every, train.check_replicas_every, sorted(train.offloaded - {"activations"})
    return [
        ("local_sgd.fragments", table.fragments > every,
         f"expected at most one fragment per step (every = {every}), got {table.fragments}", f"set every = {table.fragments} or more"),
        ("train.lr_scaling", train.lr_scaling == "adaptive",
         "AdaScale compares gradients with their mean over the ranks, which local SGD does not compute", 'use lr_scaling = "linear"'),
        ("train.optimizer", train.optimizer == "adamw_8bit",
         "before a save, local SGD averages the optimizer state of the ranks, which adamw_8bit keeps in 8 bits", 'use optimizer = "adamw"'),
        ("train.offload", bool(offloaded),
         f"local SGD exchanges what is in the memory of the device, but offload moves {', '.join(offloaded)} out of it",
         'set offload = "none" or "activations"'),
        ("train.average_decay", train.average_decay > 0,
         "the moving average would follow the parameters of each rank, which differ between exchanges", "set average_decay = 0"),
        ("train.check_replicas_every", checked > 0 and (table.fragments > 1 or checked % every > 0),
         f"replicas are equal only after an exchange of all parameters, but check_replicas_every = {checked} checks at other steps",
         f"set check_replicas_every = 0, or a multiple of {every} with local_sgd.fragments = 1"),
        ("gradient_compression.algorithm", compression.algorithm != "none" and table.algorithm == "average",
         '"average" sends parameters, whose rounding would stay as large until the end of the training, while "diloco" sends differences',
         'use local_sgd.algorithm = "diloco", with outer_lr = 1 and outer_momentum = 0 for the mean'),
        ("gradient_compression.momentum", compression.algorithm == "top_k" and compression.momentum > 0,
         "momentum correction would be a second momentum beside local_sgd.outer_momentum", "set gradient_compression.momentum = 0"),
    ]  # fmt: skip
