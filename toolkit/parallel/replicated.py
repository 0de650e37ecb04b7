"""A whole model on every rank, gradients summed in buckets while the backward pass runs: torch's DDP."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.gradient import choose_reduction
from toolkit.config.resolved import ResolvedJob
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.passes import PassesInTurn
from toolkit.topology.facts import Topology
from toolkit.world.facts import World


def replicate(model: nn.Module, mesh: Mesh, world: World, config: ResolvedJob, topology: Topology) -> PassesInTurn:
    """Keep `model` equal on all ranks of `replicate`. Collective.

    The gradient that DDP leaves is the mean over ranks. S. Li et al., "PyTorch Distributed", VLDB 2020, arXiv:2006.15704.
    """
    group = mesh.group("replicate")
    parallel = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.parallel.unused_parameters,
    )
    choose_reduction(parallel, world, config.parallel.reduction, topology)
    return PassesInTurn(parallel, float(mesh.sizes["replicate"]), parallel.no_sync)
