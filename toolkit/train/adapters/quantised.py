"""Frozen weights in 4 or 8 bits: T. Dettmers et al., "QLoRA", 2023, arXiv:2305.14314, with kernels of bitsandbytes.

The packed bytes are neither parameters nor buffers: strategies that move, split or reduce parameters do not see them,
because the bytes have no meaning without their scales. A rank packs its own part after the tensor-parallel split.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from toolkit.errors import ToolkitError

__all__ = ["Quantised"]

_LARGEST_INT8 = 127


class Quantised:
    """The packed weight of one layer; before `pack`, its shape and split alone.

    Args:
        weight: the parameter that it replaces, on the meta device.
        kind: "nf4", "fp4" or "int8".
        double: quantise the scales of 4-bit weights, too.
    """

    def __init__(self, weight: Tensor, kind: str, double: bool) -> None:
        self.weight = weight.detach()
        self._kind, self._double = kind, double
        self._packed: Tensor | None = None
        self._scales: Any = None
        if kind != "int8":
            _library()

    def pack(self, own: Tensor) -> None:
        """Keep this rank's part of the weight in packed form."""
        if self._kind == "int8":
            scales = own.abs().amax(1, keepdim=True).clamp_min(torch.finfo(own.dtype).tiny) / _LARGEST_INT8
            self._packed, self._scales = (own / scales).round().to(torch.int8), scales
        else:
            self._packed, self._scales = _library().quantize_4bit(
                own, compress_statistics=self._double, quant_type=self._kind
            )

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of the weight as numbers."""
        if self._packed is None:  # a trial on shapes alone
            return _own(self.weight).to(dtype)
        if self._kind == "int8":
            return (self._packed * self._scales).to(dtype)
        numbers: Tensor = _library().dequantize_4bit(self._packed, self._scales)
        return numbers.to(dtype)

    def product(self, stream: Tensor) -> Tensor:
        """Return W x; of a split weight, with the placement that torch gives the product of a split `nn.Linear`."""
        if not isinstance(stream, DTensor):
            return _product(stream, self)
        (split,) = self.weight.placements if isinstance(self.weight, DTensor) else (None,)
        by_rows = split == Shard(0)
        own = stream.to_local(grad_placements=[Partial()] if by_rows else stream.placements)
        output = [Shard(own.dim() - 1) if by_rows else Partial()]
        return DTensor.from_local(_product(own, self), stream.device_mesh, output, run_check=False)


class _Product(torch.autograd.Function):
    """W x, which unpacks W again for the backward pass instead of keeping its numbers."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, weight: Quantised) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(stream, weight.whole(stream.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.whole(gradient.dtype), None


@torch.compiler.disable
def _product(stream: Tensor, weight: Quantised) -> Tensor:
    product: Tensor = _Product.apply(stream, weight)
    return product


def _own(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _library() -> Any:
    try:
        import bitsandbytes.functional as library
    except ImportError:
        raise ToolkitError(
            "4-bit weights require the package bitsandbytes, which is not installed",
            where="adapters.quantize",
            fix="pip install 'toolkit[quantized]', or set quantize = \"int8\"",
        ) from None
    return library
