"""Split experts over the ranks of `ep` and `tp`, and shard what remains over the ranks that have the same experts."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel.experts.layer import ExpertRanks, Experts, MoE
from toolkit.parallel.mesh import Mesh

__all__ = ["check_experts", "shard_experts", "split_experts"]

# The dimensions of (experts, hidden, width) and (experts, width, hidden): each rank of `tp` has hidden units, and each of
# those with the same experts has columns or rows of the width, so that no dimension is divided twice.
_HIDDEN = {"gate": 1, "up": 1, "down": 2}
_WIDTH = {"gate": 2, "up": 2, "down": 1}


def layers_of(module: nn.Module) -> list[MoE]:
    """Return the layers with experts."""
    return [layer for layer in module.modules() if isinstance(layer, MoE)]


def check_experts(model: nn.Module, mesh: Mesh, settings: ParallelTable) -> None:
    """Reject a model whose experts cannot be split over this mesh.

    Raises:
        ToolkitError: the whole `model` has no experts, or a number or width that is not divisible.
    """
    layers = layers_of(model)
    ep, tp = mesh.sizes["ep"], mesh.sizes["tp"]
    if ep > 1 and not layers:
        raise ToolkitError(
            f"ep = {ep} splits experts, but {type(model).__name__} has no module MoE",
            where="parallel.ep",
            fix="set ep = 1, or use toolkit.parallel.experts.layer.MoE in the model",
        )
    if layers and mesh.sizes["pp"] > 1 and settings.schedule == "zero_bubble":
        raise ToolkitError(
            "zero_bubble computes the gradients of weights in passes of their own, in which experts would exchange tokens again",
            where="parallel.schedule",
            fix='set schedule = "interleaved"',
        )
    if layers and settings.sequence and tp > 1:
        raise ToolkitError(
            "the ranks of tp have different tokens with parallel.sequence, but each of them has a part of every expert",
            where="parallel.sequence",
            fix="set sequence = false",
        )
    for layer in layers:
        experts, hidden, width = layer.experts.gate.shape
        _check_divisible(experts, "experts", ep, "ep", "parallel.ep")
        _check_divisible(hidden, "hidden units of an expert", tp * (8 if tp > 1 else 1), "tp * 8", "parallel.tp")
        if ep > 1:
            _check_divisible(width, "elements per token", mesh.expert_copies, "shard * cp / ep", "parallel.ep")


def _check_divisible(number: int, what: str, ranks: int, of: str, where: str) -> None:
    if number % ranks:
        raise ToolkitError(
            f"expected a number of {what} divisible by {of} = {ranks}, got {number}",
            where=where,
            fix=f"use {-(-number // ranks) * ranks} {what}, or another {where}",
        )


def split_experts(part: nn.Module, mesh: Mesh) -> None:
    """Give this rank its experts of `part`, which is on the meta device, and of each its tensor-parallel part."""
    ep, tp = mesh.group("ep"), mesh.group("tp")
    names = tuple(name for name, group in (("ep", ep), ("tp", tp)) if group is not None)
    if not names:
        return
    device_mesh = mesh.expert_mesh[names] if ep is not None else mesh.among("tp")
    assert device_mesh is not None
    for layer in layers_of(part):
        layer.experts.ranks = ExpertRanks(ep, tp)
        for name, hidden in _HIDDEN.items():
            _split(layer.experts, name, device_mesh, [Shard(0 if axis == "ep" else hidden) for axis in names])


def _split(experts: Experts, name: str, mesh: DeviceMesh, placements: list[Shard]) -> None:
    whole = experts.get_parameter(name)
    shape = list(whole.shape)
    for axis, placement in enumerate(placements):
        shape[placement.dim] //= mesh.size(axis)
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    experts.register_parameter(name, nn.Parameter(tensor, requires_grad=whole.requires_grad))


def shard_experts(part: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Shard split experts over the ranks that have the same ones; call it before the modules around them are sharded.

    FSDP2 averages their gradients over these ranks, and the layer over those of `ep`, whose tokens they come from.
    """
    if mesh.sizes["ep"] == 1:
        return
    for layer in layers_of(part):
        dims = {id(parameter): Shard(_WIDTH[name]) for name, parameter in layer.experts.named_parameters()}

        def placement_of(parameter: nn.Parameter, dims: dict[int, Shard] = dims) -> Shard:
            return dims[id(parameter)]

        fully_shard(
            layer.experts, mesh=mesh.expert_mesh["replicate", "expert_shard"], mp_policy=policy, reshard_after_forward=reshard,
            shard_placement_fn=placement_of,
        )  # fmt: skip
