"""How large the numbers of a tensor are: norm, largest, zeros, and what is no number at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from toolkit.checkpoint.numbers import as_numbers
from toolkit.checkpoint.stored_tensors import StoredTensors

SLICE_BYTES = 32 * 1024 * 1024  # what is read at once
CHUNK = 256 * 1024  # elements that are reckoned with at once: 2 MiB as float64, which stays in a cache


@dataclass(frozen=True)
class Norms:
    """`norm` (the square root of the sum of squares) and `largest` (absolute) are of the finite elements."""

    elements: int
    norm: float
    largest: float
    zeros: int
    nans: int
    infinities: int


class Magnitudes:
    """Gathers `Norms` over the parts of a tensor."""

    def __init__(self) -> None:
        self.elements = self.zeros = self.nans = self.infinities = 0
        self.norm = self.largest = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add magnitudes: float64, not negative, of one dimension."""
        self.elements += values.size
        finite = np.isfinite(values)
        if not finite.all():
            self.nans += int(np.isnan(values).sum())
            self.infinities += int(np.isinf(values).sum())
            values = values[finite]
        self.zeros += values.size - int(np.count_nonzero(values))
        largest = float(values.max(initial=0.0))
        if largest:
            self.largest = max(self.largest, largest)
            self.norm = math.hypot(self.norm, _norm(values, largest))

    def gathered(self) -> Norms:
        return Norms(self.elements, self.norm, self.largest, self.zeros, self.nans, self.infinities)


def _norm(values: np.ndarray, largest: float) -> float:
    """Squares of what is very large or very small would leave the range of float64."""
    if 1e-120 < largest < 1e120:
        return math.sqrt(float(np.dot(values, values)))
    scaled = values / largest
    return largest * math.sqrt(float(np.dot(scaled, scaled)))


def norms_of(stored: StoredTensors, name: str, read: Callable[[int], None] = lambda count: None) -> Norms:
    """Read a tensor, verified, and gather its norms; memory is bounded by `SLICE_BYTES`, or by one row.

    Args:
        stored: the checkpoint.
        name: the tensor's key.
        read: called with the bytes that were read since the last call.

    Raises:
        CorruptCheckpointError: a block of it is damaged.
    """
    dtype = stored.manifest.tensors[name].dtype
    gathered = Magnitudes()
    for _, part in stored.boxes(name, SLICE_BYTES):
        for chunk in chunks(part):
            gathered.add(magnitudes(as_numbers(dtype, chunk)))
        read(part.nbytes)
    return gathered.gathered()


def chunks(part: np.ndarray) -> Iterator[np.ndarray]:
    """A contiguous array as one-dimensional parts of at most `CHUNK` elements."""
    flat = part.reshape(-1)
    for first in range(0, flat.size, CHUNK):
        yield flat[first : first + CHUNK]


def magnitudes(numbers: np.ndarray) -> np.ndarray:
    """Absolute values as float64. Of a complex number that is NaN or infinite in one part, so is the whole."""
    if np.iscomplexobj(numbers):
        real, imaginary = numbers.real.astype(np.float64), numbers.imag.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            whole = np.hypot(real, imaginary)
        whole[np.isnan(real) | np.isnan(imaginary)] = np.nan
        return whole
    # As float64 first: the most negative integer has no absolute value of its own type.
    return np.abs(numbers.astype(np.float64))
