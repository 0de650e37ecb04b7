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
    highest. `own` is the number of tokens of this rank's experts, divided by the mean over ranks. `dropped` is the share of assignments that no expert took, `loss` the sum of the losses that balance experts, of all layers.
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
        experts: the number of experts of each layer of the whole model, in the same order on all ranks.
        repeats: the number of ranks that count the same tokens.
        device: where the ranks count; also of a rank without such a layer.
    """

    def __init__(self, layers: Mapping[str, MoE], experts: Mapping[str, int], repeats: int, device: str) -> None:
        self.layers = dict(layers)
        self._repeats, self._device = repeats, torch.device(device)
        self._rows = {name: (row, number) for row, (name, number) in enumerate(experts.items())}

    def begin(self, samples: float, scale: float, passes: int) -> None:
        """Begin a step, as `LayerBalance.begin`."""
        for layer in self.layers.values():
            layer.balance.begin(samples, scale, passes)

    def end(self) -> Tensor:
        """End a step whose update the weights have got: update shares and biases. Collective over all ranks.

        Returns:
            (layers of the whole model, 2 + experts): the assignments that no expert took, the losses, and the tokens that
            chose each expert; zeros fill the rows of layers with fewer experts.
        """
        most = max(number for _, number in self._rows.values())
        totals = torch.zeros(len(self._rows), 2 + most, dtype=torch.float64, device=self._device)
        for name, layer in self.layers.items():
            row, number = self._rows[name]
            totals[row, : 2 + number] = layer.balance.heard()
        dist.all_reduce(totals)
        totals /= self._repeats
        for name, layer in self.layers.items():
            row, number = self._rows[name]
            _update(layer, totals[row, 2 : 2 + number])
        return totals

    def load(self, totals: Tensor) -> ExpertLoad:
        """Return what the result of `end` says; waits for the device."""
        chosen, (dropped, loss) = totals[:, 2:], totals[:, :2].sum(0).tolist()
        numbers = torch.tensor([number for _, number in self._rows.values()], device=totals.device)
        imbalance = chosen.amax(1) / (chosen.sum(1) / numbers).clamp_min(1)
        return ExpertLoad(float(imbalance.max()), self._own(chosen), dropped / max(1.0, float(chosen.sum())), loss)

    def _own(self, chosen: Tensor) -> float:
        loads = []
        for name, layer in self.layers.items():
            row, number = self._rows[name]
            of_layer = torch.zeros_like(chosen[row, :number])
            of_layer.index_copy_(0, layer.balance.places, chosen[row, :number])
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
