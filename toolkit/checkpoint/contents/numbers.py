"""Converts stored elements to numpy numbers: bfloat16 and the 8-bit floats have no numpy type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class SmallFloat:
    """A float of 8 bits: its sign if `signed`, then its exponent, then its mantissa."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: tuple[int, ...]  # bytes that mean NaN
    infinity: int | None = None  # the byte of plus infinity

    def value(self, byte: int) -> float:
        """The number that one byte represents.

        The formats are those of OCP 8-bit floating point 1.0 (e4m3fn, e5m2), of OCP Microscaling 1.0 (e8m0fnu), and
        of Noune et al. 2022, arXiv:2206.02915 (fnuz).
        """
        if byte in self.nan:
            return float("nan")
        magnitude_bits = self.exponent_bits + self.mantissa_bits
        sign = -1.0 if byte >> magnitude_bits else 1.0
        magnitude = byte & ((1 << magnitude_bits) - 1)
        if magnitude == self.infinity:
            return sign * float("inf")
        exponent = magnitude >> self.mantissa_bits
        fraction = (magnitude & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)
        if self.mantissa_bits and not exponent:
            return float(sign * fraction * 2.0 ** (1 - self.bias))  # subnormal
        return float(sign * (1 + fraction) * 2.0 ** (exponent - self.bias))


SMALL_FLOATS = {
    "float8_e4m3fn": SmallFloat(4, 3, 7, nan=(0x7F, 0xFF)),
    "float8_e5m2": SmallFloat(5, 2, 15, nan=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), infinity=0x7C),
    "float8_e4m3fnuz": SmallFloat(4, 3, 8, nan=(0x80,)),
    "float8_e5m2fnuz": SmallFloat(5, 2, 16, nan=(0x80,)),
    "float8_e8m0fnu": SmallFloat(8, 0, 127, nan=(0xFF,)),
}


@cache
def _values(dtype: str) -> np.ndarray:
    small = SMALL_FLOATS[dtype]
    return np.array([small.value(byte) for byte in range(256)], np.float32)


def as_numbers(dtype: str, stored: np.ndarray) -> np.ndarray:
    """The same values in a type that numpy can compute with: a float, a complex, or an integer type; bool as 0 and 1.

    Args:
        dtype: a name of `elements.ELEMENTS`.
        stored: elements of that type's `memory`, C-contiguous.
    """
    if dtype == "bfloat16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype in SMALL_FLOATS:
        return _values(dtype)[stored]
    if dtype == "bool":
        return stored.view(np.uint8)
    if dtype == "complex32":
        halves = stored.view(np.float16).reshape(*stored.shape, 2).astype(np.float32)
        return np.ascontiguousarray(halves).view(np.complex64)[..., 0]
    return stored
