"""Computes statistics of a tensor: norm, largest magnitude, and counts of zeros, NaNs and infinities."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import StoredTensors, as_numbers

__all__ = ["Norms", "norms_of"]

SLICE_BYTES = 32 * 1024 * 1024  # the most bytes to read at once
CHUNK = 32 * 1024  # elements to process at once; as float64 they fit into the cache of a core
_SAFE_SQUARES = (1e-200, 1e200)  # a sum of squares in this range has neither underflow nor overflow


@dataclass(frozen=True)
class Norms:
    """Statistics of a tensor. `norm` (2-norm) and `largest` (largest magnitude) include only finite elements."""

    elements: int
    norm: float
    largest: float
    zeros: int
    nans: int
    infinities: int


class Magnitudes:
    """Accumulates `Norms` over the parts of a tensor."""

    def __init__(self) -> None:
        self.elements = self.zeros = self.nans = self.infinities = 0
        self.norm = self.largest = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add one-dimensional float64 values; their signs have no effect."""
        self.elements += values.size
        self.zeros += int(np.count_nonzero(values == 0))
        with np.errstate(over="ignore", invalid="ignore"):
            squares = _squares(values)
        if _SAFE_SQUARES[0] < squares < _SAFE_SQUARES[1]:
            self.largest = max(self.largest, float(values.max()), -float(values.min()))
            self.norm = math.hypot(self.norm, math.sqrt(squares))
        elif values.size:
            self._add_unusual(values)

    def _add_unusual(self, values: np.ndarray) -> None:
        """Add values that are all zero, contain NaN or infinities, or whose squares leave the range of float64."""
        self.nans += int(np.count_nonzero(np.isnan(values)))
        self.infinities += int(np.count_nonzero(np.isinf(values)))
        finite = np.abs(values[np.isfinite(values)])
        largest = float(finite.max(initial=0.0))
        if largest:
            self.largest = max(self.largest, largest)
            scaled = finite / largest
            self.norm = math.hypot(self.norm, largest * math.sqrt(_squares(scaled)))

    def gathered(self) -> Norms:
        return Norms(self.elements, self.norm, self.largest, self.zeros, self.nans, self.infinities)


def _squares(values: np.ndarray) -> float:
    """Return the sum of squares. Avoids np.dot, because starting BLAS threads on all CPUs costs more than it saves."""
    return float(np.einsum("i,i->", values, values))


def norms_of(stored: StoredTensors, name: str, read: Callable[[int], None] = lambda count: None) -> Norms:
    """Read and check a tensor and compute its norms, with at most `SLICE_BYTES` or one element in memory.

    Calls `read` with the number of bytes read since its last call. Raises CorruptCheckpointError for a damaged block.
    """
    dtype = stored.manifest.tensors[name].dtype
    magnitudes = Magnitudes()
    for _, part in stored.boxes(name, SLICE_BYTES):
        for chunk in chunks(part):
            magnitudes.add(reals(as_numbers(dtype, chunk)))
        read(part.nbytes)
    return magnitudes.gathered()


def chunks(part: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a contiguous array in one-dimensional parts of at most `CHUNK` elements."""
    flat = part.reshape(-1)
    for first in range(0, flat.size, CHUNK):
        yield flat[first : first + CHUNK]


def reals(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers as float64; for complex numbers their absolute values, or NaN if either part is NaN."""
    if not np.iscomplexobj(numbers):
        return numbers.astype(np.float64)
    real, imaginary = numbers.real.astype(np.float64), numbers.imag.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        whole = np.hypot(real, imaginary)
    whole[np.isnan(real) | np.isnan(imaginary)] = np.nan
    return whole
