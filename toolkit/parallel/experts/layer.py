"""A mixture of experts in place of a perceptron: `MoE`.

In a single process it needs nothing else; `distribute` tells it which ranks share its experts.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout, grouped_mm, silu
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from toolkit.errors import ToolkitError
from toolkit.parallel.experts.balance import Balance, LayerBalance
from toolkit.parallel.experts.exchange import exchange_tokens
from toolkit.parallel.experts.router import Router, Routing
from toolkit.parallel.experts.splits import copy_to, mean_gradient, sum_over

__all__ = ["Experts", "MoE"]

_ALIGNED = 8  # elements; torch.nn.functional.grouped_mm reads rows of 16 bytes


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of a layer, and those that share each expert; None without others."""

    experts: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None

    def __deepcopy__(self, _: Any) -> "ExpertRanks":
        return self  # a copy of the model is on the same ranks


class Experts(nn.Module):
    """Perceptrons with gated linear units: down(silu(gate(x)) * up(x)), without biases (N. Shazeer, arXiv:2002.05202).

    `gate` and `up` are (experts, hidden, width), `down` is (experts, width, hidden).
    """

    def __init__(self, experts: int, width: int, hidden: int, expert_dropout: float = 0.0) -> None:
        """Create the experts; `expert_dropout` is the dropout between their two layers (arXiv:2101.03961, section 2.4).

        Raises:
            ToolkitError: a width is not supported by the grouped matrix product.
        """
        super().__init__()
        for name, size in (("width", width), ("hidden width", hidden)):
            if size % _ALIGNED:
                raise ToolkitError(
                    f"expected a {name} of experts divisible by {_ALIGNED}, got {size}",
                    where="experts",
                    fix=f"use {-(-size // _ALIGNED) * _ALIGNED}",
                )
        self.expert_dropout = expert_dropout
        self.ranks = ExpertRanks()
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Return the output of each row, (rows, width).

        Args:
            rows: (rows, width), ordered by expert.
            counts: (experts of this rank,), the rows of each expert; None computes shapes alone, with the first expert.
        """
        gate, up, down = (self._local(weight) for weight in (self.gate, self.up, self.down))
        if not rows.is_meta and torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, gate, up, down = (tensor.to(dtype) for tensor in (rows, gate, up, down))
        ends = None if counts is None else counts.cumsum(0).int()
        hidden = silu(_product(rows, gate, ends)) * _product(rows, up, ends)
        return _product(dropout(hidden, self.expert_dropout, self.training), down, ends)

    def _local(self, weight: Tensor) -> Tensor:
        """Return this rank's part; its gradient is a mean over the ranks of the experts, whose losses it comes from."""
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return local if self.ranks.experts is None else mean_gradient(local, dist.get_world_size(self.ranks.experts))


def _product(rows: Tensor, weights: Tensor, ends: Tensor | None) -> Tensor:
    """Multiply the rows of each expert, which end at `ends`, by its weights, (experts, outputs, inputs)."""
    if ends is None:
        return rows @ weights[0].t()
    return grouped_mm(rows, weights.transpose(1, 2), offs=ends)


class MoE(nn.Module):
    """Experts, of which each token uses a few, and optionally a shared one, which every token uses."""

    def __init__(
        self,
        width: int,
        hidden: int,
        routing: Routing,
        balance: Balance | None = None,
        shared: nn.Module | None = None,
        expert_dropout: float = 0.0,
    ) -> None:
        """Create the layer.

        Args:
            width: the width of tokens and outputs.
            hidden: the width of an expert's hidden layer.
            balance: how the experts get equal shares of the tokens.
            shared: a module whose output is added to that of the experts.
        """
        super().__init__()
        self.routing = routing
        self.router = Router(width, routing)
        self.experts = Experts(routing.experts, width, hidden, expert_dropout)
        self.shared = shared
        self.balance = LayerBalance(routing.experts, balance or Balance())

    def forward(self, stream: Tensor) -> Tensor:
        """Return the outputs of tokens (batch, tokens, width), in the same shape. Collective over the ranks of `ep`."""
        if stream.dim() != 3:
            raise ToolkitError(
                f"expected tokens of shape (batch, tokens, width), got {tuple(stream.shape)}",
                where=type(self).__name__,
                fix="reshape them: the losses that balance experts need the number of tokens of a sample",
            )
        tokens = stream.flatten(0, -2)
        if tokens.is_meta or isinstance(tokens, FakeTensor):
            return self._shapes(tokens).view(*stream.shape[:-1], -1)
        routed = self.router(tokens)
        weights = self.balance.hear(routed, stream.shape[-2])
        shared: list[Tensor] = []

        def meanwhile() -> None:
            if self.shared is not None:
                shared.append(self.shared(tokens))

        rows = copy_to(tokens, self.experts.ranks.tensor).index_select(0, routed.tokens)
        if torch.is_autocast_enabled(rows.device.type):  # as the experts would do after the exchange
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        slots = self.balance.places[routed.experts]
        outputs = exchange_tokens(
            rows, slots, self.routing.experts, self.experts.ranks.experts, self._compute, meanwhile
        )
        outputs = sum_over(outputs, self.experts.ranks.tensor)
        mixed = torch.zeros_like(tokens, dtype=torch.float32)
        mixed = mixed.index_add(0, routed.tokens, outputs.float() * weights[:, None])
        if routed.passed is not None:
            mixed = mixed + tokens * routed.passed[:, None]
        mixed = mixed.to(outputs.dtype)
        for output in shared:
            mixed = mixed + output
        return mixed.view(stream.shape)

    @torch.compiler.disable  # the grouped product compiles only in bf16
    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        # When a pass is repeated, FSDP2 gathers weights by other operations than the first time. Selective recomputation,
        # which compares the operations of both passes, must not see them.
        with _disable_current_modes() as disabled, ExitStack() as others:
            for mode in reversed(disabled):
                if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
                    others.enter_context(mode)
            outputs: Tensor = self.experts(rows, counts)
        return outputs

    def _shapes(self, tokens: Tensor) -> Tensor:
        """Return outputs of the right shape with the operations of a token: values, which it lacks, decide no shape here."""
        top = self.routing.top
        weights = self.router.gate(tokens).softmax(-1)[:, :top]
        rows = tokens[:, None].expand(-1, top, -1).flatten(0, 1)
        mixed = (self.experts(rows, None).unflatten(0, (-1, top)) * weights[..., None]).sum(1)
        return mixed if self.shared is None else mixed + self.shared(tokens)
