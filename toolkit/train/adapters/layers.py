"""A linear layer with a frozen weight and a low-rank adapter: y = W x + scale B A dropout(x).

E. Hu et al., "LoRA", 2021, arXiv:2106.09685; the scale alpha / sqrt(rank) is from D. Kalajdzievski, "rsLoRA", 2023,
arXiv:2312.03732. A layer keeps the names of its weight and bias, so that checkpoints of the base fit.

W may be quantised: T. Dettmers et al., "QLoRA", 2023, arXiv:2305.14314. Its packed bytes are neither a parameter nor a
buffer, so strategies that move, split or reduce these do not see them: the bytes have no meaning without their scales.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from toolkit.errors import ToolkitError
from toolkit.train.memory.local_parts import local_of

__all__ = ["AdaptedLinear", "Quantised", "Scale", "adapted_layers"]

_LARGEST_INT8 = 127

_BY_OUTPUTS = {"lora_A": None, "lora_B": 0}


@dataclass(frozen=True)
class Scale:
    """The settings that determine the product of an adapter."""

    rank: int
    alpha: float
    rank_stabilized: bool = False

    def __str__(self) -> str:
        return f"rank = {self.rank}, alpha = {self.alpha:g}, rank_stabilized = {str(self.rank_stabilized).lower()}"

    @property
    def factor(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)


class Quantised:
    """The packed weight of one layer; before `pack`, only its shape and split.

    `weight` is the parameter that it replaces, on the meta device; `double` quantises the scales of 4-bit weights, too.
    """

    def __init__(self, weight: Tensor, kind: str, double: bool) -> None:
        self.weight = weight.detach()
        self._kind, self._double = kind, double
        self.packed: Tensor | None = None
        self._scales: Any = None
        if kind != "int8":
            _library()

    def pack(self, own: Tensor) -> None:
        """Keep this rank's part of the weight in packed form."""
        if self._kind == "int8":
            self._scales = own.abs().amax(1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny) / _LARGEST_INT8
            self.packed = (own / self._scales).round().to(torch.int8)
        else:
            packed = _library().quantize_4bit(own, compress_statistics=self._double, quant_type=self._kind)
            self.packed, self._scales = packed

    def whole(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return this rank's part of the weight as numbers."""
        if self.packed is None:  # a trial on shapes alone
            return torch.empty_like(local_of(self.weight), dtype=dtype, device=device)
        if self._kind == "int8":
            return (self.packed * self._scales).to(dtype)
        numbers: Tensor = _library().dequantize_4bit(self.packed, self._scales)
        return numbers.to(dtype)

    @torch.compiler.disable
    def product(self, stream: Tensor) -> Tensor:
        """Return W x; of a split weight, with the placement that torch gives the product of a split `nn.Linear`."""
        if not isinstance(stream, DTensor):
            return _Product.apply(stream, self)
        by_rows = isinstance(self.weight, DTensor) and self.weight.placements == (Shard(0),)
        own = _Product.apply(stream.to_local(grad_placements=[Partial()] if by_rows else stream.placements), self)
        return DTensor.from_local(own, stream.device_mesh, [Shard(-1) if by_rows else Partial()], run_check=False)


def _library() -> Any:
    """Return the functions of bitsandbytes; no object keeps them, since a copy of a model cannot contain a Python module."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError:
        message, fix = "4-bit weights require the package bitsandbytes", "pip install 'toolkit[quantized]'"
        raise ToolkitError(message, where="adapters.quantize", fix=f'{fix}, or set quantize = "int8"') from None


class _Product(torch.autograd.Function):
    """W x, which unpacks W again for the backward pass instead of keeping its numbers."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, weight: Quantised) -> Tensor:
        ctx.weight = weight
        kind = stream.device.type
        is_cast = kind != "meta" and torch.is_autocast_enabled(kind)  # torch has no autocast for the meta device
        dtype = torch.get_autocast_dtype(kind) if is_cast else stream.dtype
        return nn.functional.linear(stream.to(dtype), weight.whole(dtype, stream.device))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.whole(gradient.dtype, gradient.device), None


class AdaptedLinear(nn.Linear):
    """A frozen `nn.Linear` with an adapter, or without one if only its weight is quantised."""

    # The dimension that tensor-parallel ranks split, by the style of the layer; None: whole on each rank.
    split_dims: ClassVar[Mapping[str, Mapping[str, int | None]]] = {
        **dict.fromkeys(("column", "head", "head_gathered"), _BY_OUTPUTS),
        "row": {"lora_A": 1, "lora_B": None},
    }
    lora_A: nn.Parameter | None  # noqa: N815  the names in peft's files
    lora_B: nn.Parameter | None  # noqa: N815
    factor: float
    dropout: float
    is_merged: bool
    quantised: Quantised | None

    @classmethod
    def of(cls, layer: nn.Module) -> "AdaptedLinear":
        """Freeze a linear layer and turn it into one of this class, in place: its name, ties and hooks remain."""
        assert isinstance(layer, nn.Linear)
        layer.requires_grad_(False)
        if isinstance(layer, cls):
            return layer
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.lora_A = layer.lora_B = layer.quantised = None
        layer.is_merged, layer.dropout = False, 0.0
        return layer

    def add(self, scale: Scale, dropout: float) -> None:
        """Add an adapter whose matrices have no values yet, in the type of the weight, but at least 32 bits."""
        low = self.weight.new_empty(scale.rank, self.in_features).to(
            torch.promote_types(self.weight.dtype, torch.float32)
        )
        self.lora_A, self.lora_B = nn.Parameter(low), nn.Parameter(low.new_empty(self.out_features, scale.rank))
        self.factor, self.dropout = scale.factor, dropout

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name in nn.Linear
        if self.quantised is None:
            output = nn.functional.linear(input, self.weight, self.bias)
        else:
            output = self.quantised.product(input)
            output = output if self.bias is None else output + self.bias.to(output.dtype)
        if self.lora_A is None or self.lora_B is None or self.is_merged:
            return output
        low = nn.functional.linear(self._dropped(input).to(self.lora_A.dtype), self.lora_A)
        return output + (self.factor * nn.functional.linear(low, self.lora_B)).to(output.dtype)

    def _dropped(self, stream: Tensor) -> Tensor:
        if not isinstance(stream, DTensor) or not self.training:
            return nn.functional.dropout(stream, self.dropout, self.training)
        own = nn.functional.dropout(stream.to_local(), self.dropout)  # torch's own draws for DTensors need a GPU
        return DTensor.from_local(own, stream.device_mesh, stream.placements, run_check=False)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the adapted layers of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))
