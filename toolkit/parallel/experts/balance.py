"""The balance of the experts of a layer: losses, a bias of the choice, and the number of tokens of each expert.

The loss that balances experts is experts * sum(share * probability) over the experts (Switch Transformers, 2021,
arXiv:2101.03961, equation 4), with the mean probability over the global batch. A layer cannot know the shares of a global
batch before its last micro-batch, so they are those of the last step. The loss of the logits is the mean of
logsumexp(logits)^2 (ST-MoE, 2022, arXiv:2202.08906, equation 5). The bias follows L. Wang et al., 2024, arXiv:2408.15664.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.parallel.experts.router import Routed

__all__ = ["Balance", "LayerBalance"]


@dataclass(frozen=True)
class Balance:
    """How experts get equal shares of the tokens.

    Args:
        loss: the factor of the loss that balances experts.
        z_loss: the factor of the loss that keeps the logits of the gate small.
        bias_rate: the change per step of the bias of an expert with fewer, or more, tokens than the mean.
    """

    loss: float = 0.01
    z_loss: float = 1e-3
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ToolkitError(
                    f"expected {name} of 0 or more, got {value:g}", where="experts", fix="use 0 to turn it off"
                )


class LayerBalance(nn.Module):
    """Counts the tokens of each expert in training passes, and adds the gradients of the two losses to those of the gate.

    `shares` is the share of each expert in the last step, `history` their moving average, and `places` the place of each
    expert in the weights of `Experts`. `trigger` has the number of checks in a row that found an imbalance, and the step in
    which experts last moved, or -1.
    """

    shares: Tensor
    history: Tensor
    places: Tensor
    trigger: Tensor

    def __init__(self, experts: int, settings: Balance) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("shares", torch.full((experts,), 1 / experts))
        self.register_buffer("history", torch.full((experts,), 1 / experts))
        self.register_buffer("places", torch.arange(experts))
        self.register_buffer("trigger", torch.tensor([0, -1]))
        self.begin(samples=0, scale=1.0, passes=1)

    def begin(self, samples: float, scale: float, passes: int) -> None:
        """Begin a step. Without it, the losses are means over the tokens of each micro-batch.

        Args:
            samples: the global batch; on ranks that share sequences, times their number.
            scale: the factor of the loss in the backward passes of this step.
            passes: the number of micro-batches.
        """
        self._samples, self._scale, self._passes = samples, scale, passes
        self._heard: list[tuple[Tensor, Tensor, Tensor]] = []

    def heard(self) -> Tensor:
        """Return (2 + experts,), float64, of this rank since `begin`: the assignments that no expert took, its part of the
        losses, and the tokens that chose each expert.
        """
        # Before its first step, a pipeline of torch runs one more pass, without data, to get shapes.
        each = [
            torch.cat([torch.stack([dropped, part]), chosen]) for chosen, dropped, part in self._heard[-self._passes :]
        ]
        return torch.stack(each).sum(0) if each else self.shares.new_zeros(len(self.shares) + 2, dtype=torch.float64)

    def hear(self, routed: Routed, tokens: int) -> Tensor:
        """Return the weights of the assignments, with the losses in their graph.

        Args:
            tokens: the tokens of a sample on this rank.
        """
        if not (self.training and torch.is_grad_enabled()):
            return routed.weights
        per_token = 1 / (self._samples * tokens) if self._samples else 1 / max(1, len(routed.logits))
        part = self.settings.loss * len(self.shares) * (routed.probabilities.sum(0) * self.shares).sum()
        part = part + self.settings.z_loss * routed.logits.logsumexp(1).square().sum()
        return cast(Tensor, _Hear.apply(routed.weights, part * per_token, self, routed))


class _Hear(torch.autograd.Function):
    """Counts in the backward pass, which runs once for each micro-batch even if its forward pass is repeated."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, part: Tensor, balance: LayerBalance, routed: Routed) -> Tensor:
        ctx.balance, ctx.heard = balance, (routed.chosen.double(), routed.dropped.double(), part.detach().double())
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        balance: LayerBalance = ctx.balance
        balance._heard.append(ctx.heard)
        del balance._heard[: -balance._passes]
        return gradient, gradient.new_full((), balance._scale, dtype=torch.float32), None, None
