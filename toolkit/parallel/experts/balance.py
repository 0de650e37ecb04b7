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


class LayerBalance(nn.Module):
    """Counts the tokens of each expert in training passes, and adds the gradients of the two losses to those of the gate.

    `shares` is the share of each expert in the last step, and `places` its place in the weights of `Experts`. `chosen` and
    `dropped` count the tokens of this rank since `begin`, and `loss` is its part of the two losses, without their scale.
    """

    shares: Tensor
    places: Tensor

    def __init__(self, experts: int, settings: Balance) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("shares", torch.full((experts,), 1 / experts))
        self.register_buffer("places", torch.arange(experts))
        self.samples, self.scale = 0.0, 1.0
        self.begin(self.samples, self.scale)

    def begin(self, samples: float, scale: float) -> None:
        """Begin a step. Without it, the losses are means over the tokens of each micro-batch.

        Args:
            samples: the global batch; on ranks that share sequences, times their number.
            scale: the factor of the loss in the backward passes of this step.
        """
        self.samples, self.scale = samples, scale
        self.chosen = torch.zeros_like(self.places)
        self.dropped = torch.zeros((), dtype=torch.long, device=self.places.device)
        self.loss = torch.zeros((), device=self.places.device)

    def hear(self, routed: Routed, tokens: int) -> Tensor:
        """Return the weights of the assignments, with the losses in their graph.

        Args:
            tokens: the tokens of a sample on this rank.
        """
        if not (self.training and torch.is_grad_enabled()):
            return routed.weights
        per_token = 1 / (self.samples * tokens) if self.samples else 1 / max(1, len(routed.logits))
        part = self.settings.loss * len(self.shares) * (routed.probabilities.sum(0) * self.shares).sum()
        part = part + self.settings.z_loss * routed.logits.logsumexp(1).square().sum()
        return cast(Tensor, _Hear.apply(routed.weights, part * per_token, self, routed))


class _Hear(torch.autograd.Function):
    """Counts in the backward pass, which runs once for each micro-batch even if its forward pass is repeated."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, part: Tensor, balance: LayerBalance, routed: Routed) -> Tensor:
        ctx.balance, ctx.routed = balance, (part.detach(), routed.chosen, routed.dropped)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        balance: LayerBalance = ctx.balance
        part, chosen, dropped = ctx.routed
        balance.chosen += chosen
        balance.dropped += dropped
        balance.loss += part
        return gradient, torch.full_like(part, balance.scale), None, None
