"""Reads tensors of one checkpoint as numpy arrays and checks their digests, in one process without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.loading.shard_reader import ShardReader
from toolkit.checkpoint.loading.wanted import WantedBox, reads_of

__all__ = ["StoredTensors"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # the offset of a part in the global tensor, and its shape


class StoredTensors:
    """A context manager that reads boxes of the tensors in a checkpoint and checks each 4 MiB block once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder
        self._shards: dict[str, ShardReader] = {}

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._shards.values():
            shard.__exit__(kind, error, trace)
        self._shards = {}

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor at its global shape, with the `memory` type of its element; errors as in `box`."""
        record = self.manifest.tensors[name]
        return self.box(name, (0,) * len(record.shape), record.shape)

    def box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Read a box at `offset`. Raises CorruptCheckpointError if damaged, OwnFailureError if it cannot be read."""
        record = self.manifest.tensors[name]
        whole = np.empty(tuple(shape), element(record.dtype, where=name).memory)
        for piece in record.pieces:
            common = intersection((piece.offset, piece.shape), (tuple(offset), tuple(shape)))
            if common is None:
                continue
            start, extent = common
            inside = tuple(at - begin for at, begin in zip(start, piece.offset, strict=True))
            index = tuple(slice(a - o, a - o + n) for a, o, n in zip(start, offset, extent, strict=True))
            part = whole[index] if index else whole
            self._shard(piece.file).read(reads_of([WantedBox(piece, inside, part)]))
        return whole

    def boxes(self, name: str, most_bytes: int = 64 * 1024 * 1024) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield a tensor in contiguous boxes, as `runs` splits it, each with its data."""
        record = self.manifest.tensors[name]
        for offset, shape in runs(record.shape, element(record.dtype).size_bytes, most_bytes):
            yield (offset, shape), self.box(name, offset, shape)

    def _shard(self, file: str) -> ShardReader:
        if file not in self._shards:
            self._shards[file] = ShardReader(self._folder / file, self.manifest.file(file))
        return self._shards[file]


def runs(shape: Sequence[int], element_bytes: int, most_bytes: int) -> Iterator[Box]:
    """Split a tensor into contiguous boxes in C order, each of at most `most_bytes` or one element."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    row_bytes = prod(shape[1:]) * element_bytes
    if row_bytes > most_bytes:
        for row in range(shape[0]):
            for offset, extent in runs(shape[1:], element_bytes, most_bytes):
                yield (row, *offset), (1, *extent)
        return
    rows = max(1, most_bytes // row_bytes)
    rest = (0,) * (len(shape) - 1)
    for first in range(0, shape[0], rows):
        yield (first, *rest), (min(rows, shape[0] - first), *shape[1:])


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    starts, extents = [], []
    for at, count, begin, size in zip(*one, *other, strict=True):
        start = max(at, begin)
        extent = min(at + count, begin + size) - start
        if extent <= 0:
            return None
        starts.append(start)
        extents.append(extent)
    return tuple(starts), tuple(extents)


@dataclass(frozen=True)
class SmallFloat:
    """An 8-bit float format: one sign bit if there is one left, then the exponent bits, then the mantissa bits."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: tuple[int, ...]  # the bytes that represent NaN
    infinity: int | None = None  # the byte that represents plus infinity

    def value(self, byte: int) -> float:
        """Return the number that one byte represents.

        Sources: OCP 8-bit floating point 1.0 for e4m3fn and e5m2, OCP Microscaling 1.0 for e8m0fnu, Noune et al. 2022
        (arXiv:2206.02915) for fnuz.
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
            return float(sign * fraction * 2.0 ** (1 - self.bias))  # a subnormal number
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
    """Convert C-contiguous elements to a float, complex or integer type for numpy; bool becomes 0 and 1."""
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
