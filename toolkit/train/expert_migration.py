"""What moves with the experts of a training: the state of the optimizer and the weight average."""

import torch
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
    """Return what moves the experts of `model` between ranks; None if the job moves none.

    Raises:
        ToolkitError: the job has one rank of `ep`, or state that cannot move by rows.
    """
    parallel, train = config.parallel, config.train
    if model.experts is None or not parallel.expert_migration:
        return None
    if config.adapters.rank:
        raise ToolkitError(
            "experts do not move under adapters: their checkpoints lack the experts, whose order would be lost",
            where="parallel.expert_migration",
            fix="set it to 0",
        )
    if parallel.ep == 1 or train.offloaded - {"activations"} or train.optimizer == "adamw_8bit":
        raise ToolkitError(
            "experts move only between several ranks, and not with offloaded or 8-bit state",
            where="parallel.expert_migration",
            fix='set it to 0, or ep = 2 with train.optimizer = "adamw" and without train.offload',
        )

    def companions(parameter: Tensor) -> list[Tensor]:
        of_optimizer = optimizer.state.get(parameter, {}).values()
        moved = [one for one in of_optimizer if isinstance(one, Tensor) and one.shape == parameter.shape]
        return moved + (average.of(model.module, parameter) if average else [])

    return Migration(model.experts.layers, parallel, companions)
