"""Sums over the tensor-parallel ranks that each have a part of every expert (Megatron-LM, arXiv:1909.08053, figure 3).

And the mean over the ranks whose tokens an expert gets.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["copy_to", "mean_gradient", "sum_over"]


def copy_to(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return `tensor`, which is equal on all ranks of `group`; sums its gradients over them."""
    return tensor if group is None else cast(Tensor, _Copy.apply(tensor, group))


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of the ranks' tensors; its gradient, equal on all ranks, is that of each of them."""
    return tensor if group is None else cast(Tensor, _Sum.apply(tensor, group))


def mean_gradient(weight: Tensor, ranks: int) -> Tensor:
    """Return `weight`; divides its gradient by the number of ranks."""
    return cast(Tensor, _Mean.apply(weight, ranks))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
