"""What moves with the experts of a training: the state of the optimizer and the weight average."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.distribute import DistributedModel
from toolkit.parallel.experts.migration import Migration
from toolkit.train.average import WeightAverage

__all__ = ["migration_of"]


def migration_of(
    model: DistributedModel, optimizer: torch.optim.Optimizer, average: WeightAverage | None, config: ResolvedJob
) -> Migration | None:
    """Return what moves the experts of `model` between ranks; None, with a line if the job has the key, if they cannot move.

    Raises:
        ToolkitError: the job has state that cannot move by rows.
    """
    parallel, train = config.parallel, config.train
    if not parallel.expert_migration:
        return None
    if model.experts is None or parallel.ep == 1:  # also after a resume on fewer ranks
        why = "the model has none" if model.experts is None else "each rank has all of them (parallel.ep = 1)"
        if dist.get_rank() == 0:
            sys.stderr.write(f"no experts move (parallel.expert_migration): {why}\n")
        return None
    if config.adapters.rank:
        raise ToolkitError(
            "experts do not move under adapters: their checkpoints lack the experts, whose order would be lost",
            where="parallel.expert_migration",
            fix="set it to 0",
        )
    if train.offloaded - {"activations"} or train.optimizer == "adamw_8bit":
        raise ToolkitError(
            "experts cannot move with offloaded or 8-bit state",
            where="parallel.expert_migration",
            fix='set expert_migration = 0, or train.optimizer = "adamw" without train.offload',
        )

    def companions(parameter: Tensor) -> list[Tensor]:
        of_optimizer = optimizer.state.get(parameter, {}).values()
        moved = [one for one in of_optimizer if isinstance(one, Tensor) and one.shape == parameter.shape]
        return moved + (average.of(model.module, parameter) if average else [])

    return Migration(model.experts.layers, parallel, companions)
