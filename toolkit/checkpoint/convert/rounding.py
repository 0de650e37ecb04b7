"""Rounds floating-point numbers to another precision by the rule of IEEE 754: to the nearest, ties to even."""

from __future__ import annotations

import numpy as np

from toolkit.errors import ToolkitError

_CONVERTIBLE = ("float64", "float32", "float16", "bfloat16")


def converted_dtype(dtype: str, wanted: str | None) -> str:
    """The element type after rounding: integers, booleans, complex and 8-bit numbers keep theirs."""
    return wanted if wanted is not None and dtype in _CONVERTIBLE else dtype


def convert(array: np.ndarray, dtype: str, wanted: str, name: str) -> np.ndarray:
    """Numbers of type `dtype` as `wanted`, both in their elements' `memory` types.

    float64 is rounded to float32 before a 16-bit type, as in torch. NaN stays NaN.

    Raises:
        ToolkitError: a finite number is too large for `wanted`.
    """
    if dtype == wanted:
        return array
    numbers = _from_bfloat16(array) if dtype == "bfloat16" else array
    with np.errstate(over="ignore"):
        single = numbers.astype("<f4")
        result = _to_bfloat16(single) if wanted == "bfloat16" else single.astype(wanted)
    shown = _from_bfloat16(result) if wanted == "bfloat16" else result
    lost = np.isinf(shown) & np.isfinite(numbers)
    if lost.any():
        raise ToolkitError(
            f"contains {numbers[lost][0]:g}, which is too large for {wanted}",
            where=name,
            fix="choose another --dtype, or none",
        )
    return result


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def _to_bfloat16(single: np.ndarray) -> np.ndarray:
    """The upper half of each float32, rounded by its lower half."""
    bits = single.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype("<u2")
