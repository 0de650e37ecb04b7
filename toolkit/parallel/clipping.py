"""The norm of all gradients of a model that lies on several meshes, and clipping by it.

torch's own `clip_grad_norm_` takes tensors of one mesh only, and knows nothing of the parameters on other pipeline stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    stages: dist.ProcessGroup | None,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `max_norm`; returns the norm before, a scalar. Collective.

    Args:
        max_norm: 0 leaves the gradients as they are.
        stages: the ranks that hold other parameters of the same model, its pipeline stages.
        counted_elsewhere: those that another stage holds as well, which counts them in the norm.
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
    """The 2-norm of gradients, some of them in parts on other ranks; a scalar, the same on all ranks. Collective."""
    by_mesh = defaultdict(list)
    for gradient in gradients:
        by_mesh[_mesh_of(gradient)].append(gradient)
    norms = []
    for of_mesh in by_mesh.values():
        norm = get_total_norm(of_mesh)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1 and stages is None:
        return norms[0]
    square = torch.stack([norm.double() ** 2 for norm in norms]).sum() if norms else _nothing(stages)
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
