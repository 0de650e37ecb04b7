"""Attention and positions for models whose sequences may be split over ranks: `parallel.cp`.

A model calls these modules in place of `scaled_dot_product_attention` and `torch.arange`. In a single process they are
the same; `distribute` tells them which ranks share a sequence.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention

from toolkit.errors import ToolkitError
from toolkit.parallel.context.heads import heads_to_tokens, tokens_to_heads
from toolkit.parallel.context.order import own_positions
from toolkit.parallel.context.ring import RingAttention

__all__ = ["Attention", "Positions", "check_context", "split_context"]

Method = Literal["auto", "ring", "heads"]
_WHERE = "parallel.context"


@dataclass(frozen=True)
class _Ranks:
    """The ranks that share sequences, and the method of attention between them."""

    group: dist.ProcessGroup
    method: Method

    def __deepcopy__(self, _: Any) -> "_Ranks":
        return self  # a copy of the model is on the same ranks


class Attention(nn.Module):
    """Scaled dot-product attention within each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: _Ranks | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True, dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mixed values, in the shape of `query`. Collective over the ranks that share the sequences.

        Args:
            query, key, value: (batch, heads, tokens, head width), with the tokens of this rank; keys and values may have
                fewer heads, of which each then serves a group of query heads.
            is_causal: a token attends only to itself and to tokens before it.
            dropout: the probability to drop a weight; with several ranks only with the method "heads".
            scale: the factor of the scores; by default 1 / sqrt(head width).
        """
        groups = query.shape[1] != key.shape[1]
        if self.ranks is None or query.is_meta or isinstance(query, FakeTensor):  # shapes alone do not communicate
            return scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=groups
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return self._over_ranks(self.ranks, query, key, value, is_causal, dropout, scale)

    @torch.compiler.disable
    def _over_ranks(
        self, ranks: _Ranks, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float, scale: float | None
    ) -> Tensor:  # fmt: skip
        if _by_heads(ranks, query.shape[1], key.shape[1]):
            query, key, value = (tokens_to_heads(one, ranks.group) for one in (query, key, value))
            mixed = scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
            return heads_to_tokens(mixed, ranks.group)
        if dropout:
            raise ToolkitError(
                f"expected attention without dropout, which a ring does not support, got dropout = {dropout:g}",
                where=_WHERE,
                fix='set the dropout of attention to 0, or context = "heads" with a number of heads divisible by cp',
            )
        factor = scale if scale is not None else query.shape[-1] ** -0.5
        return cast(Tensor, RingAttention.apply(query, key, value, ranks.group, is_causal, factor))


class Positions(nn.Module):
    """The positions of tokens in their sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: _Ranks | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the position of each token of this rank, (tokens,), from the tokens, (batch, tokens, ...)."""
        if self.ranks is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        group = self.ranks.group
        return own_positions(tokens.shape[1], dist.get_rank(group), dist.get_world_size(group)).to(tokens.device)


def check_context(model: nn.Module, ranks: int) -> None:
    """Reject a model whose sequences cannot be split.

    Raises:
        ToolkitError: the whole `model` lacks `Attention` or `Positions`.
    """
    kinds = {type(module) for module in model.modules()}
    for kind, instead in ((Attention, "scaled_dot_product_attention"), (Positions, "torch.arange")):
        if ranks > 1 and kind not in kinds:
            raise ToolkitError(
                f"cp = {ranks} splits sequences, but {type(model).__name__} has no module {kind.__name__}",
                where="parallel.cp",
                fix=f"call toolkit.parallel.context.attention.{kind.__name__} instead of {instead}, or set cp = 1",
            )


def split_context(model: nn.Module, group: dist.ProcessGroup, method: Method) -> None:
    """Let the ranks of `group` share the sequences of `model`, or of a pipeline stage of it."""
    for module in model.modules():
        if isinstance(module, Attention | Positions):
            module.ranks = _Ranks(group, method)


def _by_heads(ranks: _Ranks, heads: int, key_heads: int) -> bool:
    """Return True if heads, and not keys and values, are exchanged.

    Raises:
        ToolkitError: the job requires it, but the heads of a rank are not divisible.
    """
    size = dist.get_world_size(ranks.group)
    fits = heads % size == 0 and key_heads % size == 0
    if ranks.method == "heads" and not fits:
        raise ToolkitError(
            f"expected a number of heads divisible by cp = {size}, got {heads} query heads and {key_heads} key heads on "
            "each tensor-parallel rank",
            where=_WHERE,
            fix='use context = "ring", or another cp',
        )
    return fits and ranks.method != "ring"
