"""Balance the experts of a model over a step: shares of the global batch, the bias, and what a user sees of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.parallel.experts.layer import MoE

__all__ = ["Balancing", "ExpertLoad", "named_layers"]

_KEPT = 0.9  # of the moving average of the shares, per step


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts of all layers in a step, over all ranks.

    `imbalance` is the number of tokens of the busiest expert of a layer over the mean, of the layer where it is the
    highest. `own` is that of the tokens that this rank's experts received over the mean of the ranks. `dropped` is the
    share of assignments that no expert took, `loss` the sum of the losses that balance experts, of all layers.
    """

    imbalance: float
    own: float
    dropped: float
    loss: float


def named_layers(module: nn.Module) -> dict[str, MoE]:
    """Return the layers with experts by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}


class Balancing:
    """Counts the tokens of experts over all ranks in each step, and updates what balances them.

    Args:
        layers: the layers of this rank, by name.
        names: those of the whole model, in the same order on all ranks.
        repeats: the number of ranks that count the same tokens.
    """

    def __init__(self, layers: Mapping[str, MoE], names: list[str], repeats: int) -> None:
        self.layers = dict(layers)
        self._names, self._repeats = names, repeats

    def begin(self, samples: float, scale: float, passes: int) -> None:
        """Begin a step, as `LayerBalance.begin`."""
        for layer in self.layers.values():
            layer.balance.begin(samples, scale, passes)

    def end(self) -> Tensor:
        """End a step whose update the weights have got: update shares and biases. Collective over all ranks.

        Returns:
            (layers of the whole model, experts + 2): the tokens that chose each expert, those that no expert took, and the
            losses.
        """
        experts = next(iter(self.layers.values())).routing.experts if self.layers else 0
        device = next(iter(self.layers.values())).balance.shares.device if self.layers else "cpu"
        totals = torch.zeros(len(self._names), experts + 2, dtype=torch.float64, device=device)
        for name, layer in self.layers.items():
            totals[self._names.index(name)] = layer.balance.heard()
        dist.all_reduce(totals)
        totals /= self._repeats
        for name, layer in self.layers.items():
            _update(layer, totals[self._names.index(name), :experts])
        return totals

    def load(self, totals: Tensor) -> ExpertLoad:
        """Return what the result of `end` says; waits for the device."""
        chosen, (dropped, loss) = totals[:, :-2], totals[:, -2:].sum(0).tolist()
        imbalance = chosen.amax(1) / chosen.mean(1).clamp_min(1)
        return ExpertLoad(float(imbalance.max()), self._own(chosen), dropped / max(1.0, float(chosen.sum())), loss)

    def _own(self, chosen: Tensor) -> float:
        loads = []
        for name, layer in self.layers.items():
            of_layer = torch.zeros_like(chosen[0]).index_copy_(0, layer.balance.places, chosen[self._names.index(name)])
            group = layer.experts.ranks.experts
            size, place = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
            by_rank = of_layer.view(size, -1).sum(1)
            loads.append(float(by_rank[place] / by_rank.mean().clamp_min(1)))
        return max(loads, default=1.0)


def _update(layer: MoE, chosen: Tensor) -> None:
    balance = layer.balance
    balance.shares.copy_(chosen / chosen.sum().clamp_min(1))
    balance.history.lerp_(balance.shares, 1 - _KEPT)
    if balance.settings.bias_rate:
        layer.router.bias += balance.settings.bias_rate * (chosen.mean() - chosen).sign().to(layer.router.bias.dtype)
