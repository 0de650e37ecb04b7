"""Ring attention: keys and values travel from rank to rank, and each rank attends with its own queries.

H. Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024, arXiv:2310.01889; with the order of tokens of
`order.py`, a rank needs of each causal block either its first half of the keys, or its last half of the queries.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.metrics.step_profile import RING
from toolkit.parallel.context.kernels import attend, attend_backward, merge
from toolkit.world.waits import waits_as

__all__ = ["RingAttention"]


class RingAttention(torch.autograd.Function):
    """`apply(query, key, value, group, is_causal, scale)`: attention over the sequences of which each rank has a part.

    Tensors have the shape (batch, heads, tokens of this rank, head width). Collective over `group`, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float
    ) -> Tensor:
        place, half = dist.get_rank(group), query.shape[2] // 2
        mixed, sums = _nothing(query)
        for source, (keys, values) in _travelling(torch.stack([key, value]), group):
            first_query, last_key = _needed(place, source, half, is_causal)
            block, block_sums = attend(
                query[:, :, first_query:], keys[:, :, :last_key], values[:, :, :last_key],
                is_causal and source == place, scale,
            )  # fmt: skip
            own = slice(first_query, None)
            mixed[:, :, own], sums[:, :, own] = merge(mixed[:, :, own], sums[:, :, own], block, block_sums)
        mixed = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        group, half = ctx.group, query.shape[2] // 2
        place = dist.get_rank(group)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        carried = None  # the gradients of the keys and values that are here, which travel along one hop behind
        for source, (keys, values) in _travelling(torch.stack([key, value]), group):
            first_query, last_key = _needed(place, source, half, ctx.is_causal)
            own = slice(first_query, None)
            block, *of_block = attend_backward(
                gradient[:, :, own], query[:, :, own], keys[:, :, :last_key], values[:, :, :last_key], mixed[:, :, own],
                sums[:, :, own], ctx.is_causal and source == place, ctx.scale,
            )  # fmt: skip
            of_query[:, :, own] += block
            arrived = carried.wait() if carried else torch.zeros(2, *key.shape, device=key.device)
            arrived[:, :, :, :last_key] += torch.stack(of_block)
            carried = _Hop(arrived, group)
        assert carried is not None
        of_key, of_value = carried.wait().to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _needed(place: int, source: int, half: int, is_causal: bool) -> tuple[int, int | None]:
    """Return (the first query, the end of the keys) of the block of this rank and of the keys of rank `source`."""
    if not is_causal or source == place:
        return 0, None
    return (0, half) if source < place else (half, None)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention to no keys: zeros, and the log-sum-exp of nothing, both in fp32."""
    sums = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    return torch.zeros_like(query, dtype=torch.float32), sums


class _Hop:
    """A tensor on its way to the next rank of the group, while that of the previous rank arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        place, ranks = dist.get_rank(group), dist.get_world_size(group)
        following, previous = (dist.get_global_rank(group, (place + step) % ranks) for step in (1, -1))
        self._sent, self._arriving = tensor.contiguous(), torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._arriving, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        with waits_as(RING):
            for work in self._works:
                work.wait()
        return self._arriving


def _travelling(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its tensor) for all ranks of the group, this one first; the next one arrives in the meantime."""
    place, ranks = dist.get_rank(group), dist.get_world_size(group)
    here = own
    for step in range(ranks):
        hop = _Hop(here, group) if step < ranks - 1 else None
        yield (place - step) % ranks, here
        if hop is not None:
            here = hop.wait()
