"""A linear layer with a frozen weight and a low-rank adapter: y = W x + scale B A dropout(x).

E. Hu et al., "LoRA", 2021, arXiv:2106.09685; the scale alpha / sqrt(rank) is from D. Kalajdzievski, "rsLoRA", 2023,
arXiv:2312.03732. A layer keeps the names of its weight and bias, so that checkpoints of the base fit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.train.adapters.quantised import Quantised

__all__ = ["AdaptedLinear", "Scale", "adapted_layers"]


@dataclass(frozen=True)
class Scale:
    """The settings that determine the product of an adapter."""

    rank: int
    alpha: float
    rank_stabilized: bool = False

    @property
    def factor(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)


class AdaptedLinear(nn.Linear):
    """A frozen `nn.Linear` with an adapter, or without one if only its weight is quantised."""

    # The dimension in which tensor-parallel ranks split the adapter, by the style of the layer; None: whole on each rank.
    split_dims: ClassVar[Mapping[str, Mapping[str, int | None]]] = {
        "column": {"lora_A": None, "lora_B": 0},
        "head": {"lora_A": None, "lora_B": 0},
        "head_gathered": {"lora_A": None, "lora_B": 0},
        "row": {"lora_A": 1, "lora_B": None},
    }
    lora_A: nn.Parameter | None  # noqa: N815  the names in peft's files
    lora_B: nn.Parameter | None  # noqa: N815
    factor: float
    dropout: float
    quantised: Quantised | None
    is_merged: bool

    @classmethod
    def of(cls, layer: nn.Linear) -> "AdaptedLinear":
        """Turn a layer into one of this class, in place: its name, ties and hooks remain."""
        layer.requires_grad_(False)
        if isinstance(layer, cls):
            return layer
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.quantised, layer.is_merged, layer.factor, layer.dropout = None, False, 0.0, 0.0
        layer.lora_A = layer.lora_B = None
        return layer

    def add(self, factor: float, rank: int, dropout: float = 0.0) -> None:
        """Add an adapter whose matrices have no values yet, in the type of the weight, but at least 32 bits."""
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        low = torch.empty(rank, self.in_features, dtype=kind, device=self.weight.device)
        self.put(factor, low, low.new_empty(self.out_features, rank))
        self.dropout = dropout

    def put(self, factor: float, low: Tensor, high: Tensor) -> None:
        """Use these matrices."""
        self.lora_A, self.lora_B, self.factor = nn.Parameter(low), nn.Parameter(high), factor

    def delta(self) -> Tensor | None:
        """Return the change of the weight by the adapter; None without one."""
        return None if self.lora_A is None or self.lora_B is None else self.factor * (self.lora_B @ self.lora_A)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name in nn.Linear
        if self.quantised is None:
            output = nn.functional.linear(input, self.weight, self.bias)
        else:
            output = self.quantised.product(input)
            if self.bias is not None:
                output = output + self.bias
        if self.lora_A is None or self.lora_B is None or self.is_merged:
            return output
        low = nn.functional.linear(self._dropped(input).to(self.lora_A.dtype), self.lora_A)
        return output + (self.factor * nn.functional.linear(low, self.lora_B)).to(output.dtype)

    def _dropped(self, stream: Tensor) -> Tensor:
        if not self.training or not self.dropout:
            return stream
        if not isinstance(stream, DTensor):
            return nn.functional.dropout(stream, self.dropout)
        own = nn.functional.dropout(stream.to_local(), self.dropout)  # torch's own draws for DTensors need a GPU
        return DTensor.from_local(own, stream.device_mesh, stream.placements, run_check=False)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the adapted layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module
