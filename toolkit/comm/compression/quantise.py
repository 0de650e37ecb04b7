"""Compressors that send fewer bits of every number: casts, levels in blocks, and powers of two."""

from typing import Literal

import torch
from torch import Tensor

from toolkit.comm.compression.compressor import (
    RANDOM_BITS,
    Compressor,
    blocks_of,
    euclidean_norms,
    inverse,
    join,
    pack,
    random_bits,
    take,
    uniform,
    unpack,
)


def cast(dtype: torch.dtype) -> Compressor:
    """Return the cast to a 16-bit float type; sums are computed in fp32."""
    step = torch.finfo(dtype).eps / 2  # the largest relative error
    return Compressor(
        "two_phase",
        encode=lambda values, seed: values.to(dtype).view(torch.uint8),
        decode=lambda messages, n, seed: messages.view(dtype).float(),
        wire_bytes=lambda n: dtype.itemsize * n,
        contraction=lambda values: 1 - step**2,
    )


def quantiser(
    levels: int, block: int, *, is_stochastic: bool, norm: Literal["largest", "euclidean"] = "largest"
) -> Compressor:
    """Return the quantiser to whole multiples of s, from -levels to levels, with one s per block: its norm over levels.

    It rounds to the nearest multiple, or at random so that the mean is exact. With "largest" these are int8 (127
    levels), int4 (7) and TernGrad (1 level, at random; arXiv:1705.07878); with "euclidean", at random, QSGD
    (arXiv:1610.02132).
    """
    bits = 8 if levels > 7 else 4 if levels > 1 else 2
    middle = 1 << (bits - 1)

    def encode(values: Tensor, seed: int) -> Tensor:
        x = blocks_of(values, block)
        scale = _norms(x, norm) / levels
        units = x * inverse(scale)
        if is_stochastic:  # 1 - 2^-24 may round up to 1
            units.add_(uniform(units.shape, x.device, seed)).floor_().clamp_(-levels, levels)
        codes = units.add_(middle if is_stochastic else middle + 0.5).to(torch.uint8).flatten(1)  # truncates
        return join(pack(codes, bits), scale)

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        codes = unpack(messages[:, : n * bits // 8], bits)
        scale = take(messages, n * bits // 8, torch.float32, n // block, 1)
        return (blocks_of(codes, block).float().sub_(middle) * scale).flatten(1)

    def contraction(values: Tensor) -> float:
        x = blocks_of(values, block).double()
        squares, largest = x.square().sum(-1), x.abs().amax(-1)
        error = block * (_norms(x, norm)[..., 0] / levels).square() / 4
        if not is_stochastic:  # each error is also at most the number itself, and the largest number has none
            error = torch.minimum(error, squares - largest.square())
        return 1 - float(error.sum() / squares.sum())

    def wire_bytes(n: int) -> int:
        return n * bits // 8 + 4 * (n // block)

    return Compressor("two_phase", encode, decode, wire_bytes, contraction, is_stochastic, block)


def _norms(x: Tensor, norm: str) -> Tensor:
    return x.abs().amax(-1, keepdim=True) if norm == "largest" else euclidean_norms(x)


def natural() -> Compressor:
    """Return the rounding to a power of two, up with a probability that makes the mean exact (arXiv:1905.10988).

    It sends sign and exponent, 9 bits.
    """
    exponent, largest = 0xFF << RANDOM_BITS, 0xFE

    def encode(values: Tensor, seed: int) -> Tensor:
        whole = values.contiguous().view(torch.int32)
        magnitude = whole & 0x7FFFFFFF
        is_finite = magnitude < exponent
        # The carry of mantissa + random bits is 1 with the probability of rounding up.
        rounded = (magnitude + random_bits(whole.shape, whole.device, seed)) >> RANDOM_BITS
        powers = torch.where(is_finite, rounded.clamp_(max=largest), torch.full_like(rounded, 0xFF))
        return join(pack((whole < 0).to(torch.uint8), 1), powers.to(torch.uint8))

    def decode(messages: Tensor, n: int, seed: int) -> Tensor:
        signs = unpack(messages[:, : n // 8], 1)
        magnitude = messages[:, n // 8 :].int() << RANDOM_BITS
        return magnitude.view(torch.float32) * (1 - 2 * signs.float())

    return Compressor(
        "two_phase", encode, decode, lambda n: n + n // 8, lambda values: 7 / 8, is_unbiased=True, block=8
    )
