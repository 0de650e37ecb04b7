"""The interface of compressors, and what they share: packed small integers, and random numbers from a seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

RANDOM_BITS = 23  # random bits per number, as many as a float has in its mantissa


@dataclass(frozen=True)
class Compressor:
    """Turns rows of fp32 numbers, shape (rows, n), into one message per row, and back.

    Every number of a row that is not finite makes numbers that are not finite.

    Args:
        exchange: "sum" if messages, fp32 of shape (rows, length), can be added before they are decoded; "two_phase" or
            "gather" for messages of uint8, shape (rows, bytes).
        encode: returns the messages from values and a seed; for "sum", ranks must pass the same seed.
        decode: returns the values from messages, n and the seed of `encode`.
        wire_bytes: the size of the message of n numbers; if it depends on the numbers, its limit or its mean.
        contraction: a lower bound of 1 - E|C(x) - x|^2 / |x|^2 for a row x, which error feedback requires to be positive;
            None if there is none.
        is_unbiased: whether E C(x) = x.
        block: n must be a multiple of this.
    """

    exchange: Literal["sum", "two_phase", "gather"]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], Tensor]
    wire_bytes: Callable[[int], int]
    contraction: Callable[[Tensor], float] | None
    is_unbiased: bool = False
    block: int = 1

    @property
    def is_linear(self) -> bool:
        """Whether C(a x + b y) = a C(x) + b C(y)."""
        return self.exchange == "sum"


def random_bits(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    """Return random integers below 2^23, independent of the global random streams."""
    if device.type == "cpu":  # numpy is several times as fast as torch here
        generator = np.random.Generator(np.random.SFC64(seed))
        drawn = np.frombuffer(generator.bytes(4 * prod(shape)), dtype=np.int32)
        return torch.from_numpy(drawn.copy()).bitwise_and_((1 << RANDOM_BITS) - 1).view(*shape)
    drawn_there = torch.Generator(device).manual_seed(seed)
    return torch.randint(1 << RANDOM_BITS, tuple(shape), dtype=torch.int32, device=device, generator=drawn_there)


def uniform(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    """Return random numbers between 0 and 1, exclusive."""
    return random_bits(shape, device, seed).float().add_(0.5).mul_(2.0**-RANDOM_BITS)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers from 0 to 2^bits - 1, uint8 of shape (..., n), into shape (..., n * bits / 8)."""
    planes = codes.unflatten(-1, (-1, 8 // bits)).unbind(-1)
    packed = planes[0]
    for number, plane in enumerate(planes[1:], 1):
        packed = packed | plane << (number * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`."""
    planes = [(packed >> (number * bits)) & ((1 << bits) - 1) for number in range(8 // bits)]
    return torch.stack(planes, -1).flatten(-2) if bits < 8 else packed


def join(*parts: Tensor) -> Tensor:
    """Return messages, shape (rows, bytes), of tensors whose first dimension is the rows."""
    rows = len(parts[0])
    return torch.cat([part.contiguous().view(torch.uint8).view(rows, -1) for part in parts], 1)


def take(messages: Tensor, start: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return the tensor at byte `start` of each message, shape (rows, *shape)."""
    length = prod(shape) * dtype.itemsize
    # A copy, because torch reads other types only from aligned memory.
    part = messages[:, start : start + length].flatten().clone()
    return part.view(dtype).view(len(messages), *shape)


def blocks_of(values: Tensor, block: int) -> Tensor:
    """Return rows as (rows, blocks, block)."""
    return values.reshape(len(values), -1, block)


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale; 0 for zero, for scales whose inverse overflows, and for NaN."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, 1 / scale, torch.zeros_like(scale))


def euclidean_norms(x: Tensor) -> Tensor:
    """Return the norms over the last dimension, which remains; squares of small or large numbers are not computed."""
    largest = x.abs().amax(-1, keepdim=True)
    return largest * (x * inverse(largest)).square().sum(-1, keepdim=True).sqrt()
