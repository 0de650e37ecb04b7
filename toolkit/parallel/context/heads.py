"""Attention with heads in place of tokens: each rank gets whole sequences of some heads, by an all-to-all.

S. Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.metrics.step_profile import ALL_TO_ALL
from toolkit.parallel.context.order import sequence_order
from toolkit.world.waits import waits_as

__all__ = ["heads_to_tokens", "tokens_to_heads"]


def tokens_to_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return whole sequences of this rank's heads, (batch, heads / ranks, tokens x ranks, width), in their order.

    `part` has all heads of this rank's tokens, (batch, heads, tokens, width). Collective; so is the backward pass.
    """
    gathered: Tensor = _Exchange.apply(part, group, True)
    return gathered.index_select(2, _order(part.shape[2], dist.get_world_size(group), part.device))


def heads_to_tokens(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all heads of this rank's tokens: the inverse of `tokens_to_heads`."""
    ranks = dist.get_world_size(group)
    parts = _order(whole.shape[2] // ranks, ranks, whole.device).argsort()
    returned: Tensor = _Exchange.apply(whole.index_select(2, parts), group, False)
    return returned


@lru_cache(maxsize=8)
def _order(tokens: int, ranks: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor of a validation could not be saved for a backward pass
        return sequence_order(tokens, ranks).to(device)


class _Exchange(torch.autograd.Function):
    """`apply(tensor, group, to_heads)`: exchange heads for tokens; the backward pass exchanges gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(tensor, group, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, ctx.group, not ctx.to_heads), None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size(group)
    cut, joined = (1, 2) if to_heads else (2, 1)
    sent = tensor.unflatten(cut, (ranks, -1)).movedim(cut, 0).contiguous()
    received = torch.empty_like(sent)
    with waits_as(ALL_TO_ALL):
        dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)
