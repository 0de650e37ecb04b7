"""Gradient clipping for models with parameters on several meshes.

torch's `clip_grad_norm_` accepts only tensors of one mesh, and ignores parameters on other pipeline stages.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["norm_of_parts", "part_of_norm"]


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    stages: dist.ProcessGroup | None,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `max_norm`; return the norm before, a scalar. Collective.

    Args:
        max_norm: 0 leaves the gradients unchanged.
        stages: the ranks of the pipeline stages, which have other parameters of the same model.
        counted_elsewhere: parameters that another stage has as well and includes in the norm.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    counted = [parameter.grad for parameter in held if id(parameter) not in elsewhere]
    norm = total_norm([gradient for gradient in counted if gradient is not None], stages)
    if max_norm:
        by_mesh = defaultdict(list)
        for parameter in held:
            by_mesh[_mesh_of(parameter)].append(parameter)
        for parameters in by_mesh.values():
            clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def total_norm(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None) -> Tensor:
    """Return the 2-norm of gradients, which may be sharded, as a scalar that is equal on all ranks. Collective."""
    by_mesh = defaultdict(list)
    for gradient in gradients:
        by_mesh[_mesh_of(gradient)].append(gradient)
    return _sum_up([_over_shards(of_mesh[0], get_total_norm(_locals(of_mesh))) for of_mesh in by_mesh.values()], stages)


def norm_of_parts(parts: Iterable[tuple[Tensor, Tensor]], stages: dist.ProcessGroup | None) -> Tensor:
    """Return `total_norm` of gradients that are gone, from (a tensor sharded like the gradient, `part_of_norm` of it)."""
    by_mesh = defaultdict(list)
    for like, norm in parts:
        by_mesh[_mesh_of(like)].append((like, norm))
    return _sum_up(
        [
            _over_shards(of_mesh[0][0], torch.linalg.vector_norm(torch.stack([norm for _, norm in of_mesh])))
            for of_mesh in by_mesh.values()
        ],
        stages,
    )


def part_of_norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm of this rank's part of a gradient, a scalar."""
    return get_total_norm(_locals([gradient]))


def _locals(gradients: Iterable[Tensor]) -> list[Tensor]:
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def _over_shards(like: Tensor, norm: Tensor) -> Tensor:
    """Return the squared norm of gradients of one mesh and placement, a float64 scalar, from that of this rank's parts.

    Sums over shards with one scalar all-reduce per sharded mesh dimension. torch itself would gather the norm of every
    gradient, and warn about each mesh without a process group. Collective.
    """
    square = norm.double() ** 2
    if isinstance(like, DTensor):
        for dimension, placement in enumerate(like.placements):
            assert not placement.is_partial(), "backward passes must leave no partial gradients"
            if not placement.is_replicate():
                dist.all_reduce(square, group=like.device_mesh.get_group(dimension))
    return square


def _sum_up(squares: list[Tensor], stages: dist.ProcessGroup | None) -> Tensor:
    square = torch.stack(squares).sum() if squares else _nothing(stages)
    if stages is not None:
        dist.all_reduce(square, group=stages)
    return square.sqrt().float()


def _nothing(stages: dist.ProcessGroup | None) -> Tensor:
    if stages is None:
        return torch.zeros((), dtype=torch.float64)
    device = "cuda" if dist.get_backend(stages) == "nccl" else "cpu"
    return torch.zeros((), dtype=torch.float64, device=device)


def _mesh_of(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
