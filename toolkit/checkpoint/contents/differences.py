"""Compares two checkpoints: the tensors element by element, and all other values."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.norms import SLICE_BYTES, Magnitudes, chunks, reals
from toolkit.checkpoint.contents.stored_tensors import StoredTensors, as_numbers
from toolkit.checkpoint.contents.tensor_tree import in_order, matches
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format.manifest import Manifest, TensorRecord

__all__ = [
    "MISSING", "NumberDifference", "TensorDifference", "ValueDifference", "keys_of", "tensor_differences",
    "value_differences", "value_keys",
]  # fmt: skip

MISSING = object()  # the value of a key that one checkpoint lacks


@dataclass(frozen=True)
class NumberDifference:
    """How the elements of two tensors with the same shape differ.

    `differing` counts elements with different bits, or with different values if the types differ. `largest` is the
    largest |b - a|, `largest_relative` the largest |b - a| / max(|a|, |b|), `norm` the 2-norm of b - a, `relative_norm`
    that norm divided by the larger norm of a and b. These exclude NaNs; a difference to infinity counts as infinity.
    """

    elements: int
    differing: int
    largest: float
    largest_relative: float
    norm: float
    relative_norm: float
    nans_a: int
    nans_b: int


@dataclass(frozen=True)
class TensorDifference:
    """A differing tensor. `what`: only_in_a, only_in_b, shape, type or values (with `numbers`), damaged (see `why`)."""

    key: str
    what: str
    a: TensorRecord | None
    b: TensorRecord | None
    numbers: NumberDifference | None = None
    why: str = ""


@dataclass(frozen=True)
class ValueDifference:
    """One value of `objects` or `state` that differs; `MISSING` for a checkpoint that lacks it."""

    key: str
    a: Any
    b: Any


def tensor_differences(
    a: StoredTensors, b: StoredTensors, keys: Sequence[str], read: Callable[[int], None] = lambda count: None
) -> Iterator[TensorDifference]:
    """Yield the tensors among `keys` that differ, in this order; each key must be in at least one of the checkpoints.

    Calls `read` with the number of bytes read since its last call. Uses memory for a few slices of `SLICE_BYTES`, or
    for a few rows if a row is larger.
    """
    for key in keys:
        one, other = a.manifest.tensors.get(key), b.manifest.tensors.get(key)
        if one is None or other is None:
            yield TensorDifference(key, "only_in_b" if one is None else "only_in_a", one, other)
        elif one.shape != other.shape:
            yield TensorDifference(key, "shape", one, other)
        else:
            try:
                numbers = _compared(a, b, key, read)
            except CorruptCheckpointError as error:
                yield TensorDifference(key, "damaged", one, other, why=str(error))
                continue
            if numbers is not None:
                yield TensorDifference(key, "values" if one.dtype == other.dtype else "type", one, other, numbers)


def keys_of(a: Manifest, b: Manifest, patterns: Sequence[str] = ()) -> list[str]:
    """Return the keys of tensors in either checkpoint that match the patterns, in natural order."""
    return sorted((key for key in {*a.tensors, *b.tensors} if matches(key, patterns)), key=in_order)


def value_keys(manifest: Manifest) -> list[str]:
    """Return the keys of all non-tensor values, in the form of `value_differences`."""
    return ["".join(path) for path in _values_of(manifest)]


class _Sums:
    """Accumulates the difference over the parts of two tensors."""

    def __init__(self) -> None:
        self.differing = 0
        self.largest_relative = 0.0
        self.a, self.b, self.difference = Magnitudes(), Magnitudes(), Magnitudes()

    def add(self, one: np.ndarray, other: np.ndarray, differs: np.ndarray) -> None:
        """Add one-dimensional arrays of numbers; `differs` is the mask of those that differ."""
        of_one, of_other = reals(one), reals(other)
        self.a.add(of_one)
        self.b.add(of_other)
        count = int(np.count_nonzero(differs))
        if not count:
            return
        self.differing += count
        if count < differs.size:
            one, other, of_one, of_other = one[differs], other[differs], of_one[differs], of_other[differs]
        distance = _distance(one, other)
        self.difference.add(distance)
        larger = np.maximum(np.abs(of_one), np.abs(of_other))
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = float(np.fmax.reduce(distance / larger))  # fmax ignores NaN, which 0 / 0 results in
        self.largest_relative = max(self.largest_relative, 0.0 if math.isnan(relative) else relative)

    def gathered(self) -> NumberDifference:
        infinite = self.difference.infinities > 0
        norm = math.inf if infinite else self.difference.norm
        larger = max(self.a.norm, self.b.norm)
        return NumberDifference(
            elements=self.a.elements,
            differing=self.differing,
            largest=math.inf if infinite else self.difference.largest,
            largest_relative=math.inf if infinite else self.largest_relative,
            norm=norm,
            relative_norm=norm / larger if larger else norm,
            nans_a=self.a.nans,
            nans_b=self.b.nans,
        )


def _compared(a: StoredTensors, b: StoredTensors, key: str, read: Callable[[int], None]) -> NumberDifference | None:
    """Return how the elements of one tensor differ, or None if types and bits are equal, which is checked first."""
    one_type, other_type = a.manifest.tensors[key].dtype, b.manifest.tensors[key].dtype
    equal_bytes = 0
    if one_type == other_type:
        for (offset, shape), one in a.boxes(key, SLICE_BYTES):
            if not np.array_equal(_bits(one), _bits(b.box(key, offset, shape))):
                break
            equal_bytes += one.nbytes
            read(2 * one.nbytes)
        else:
            return None
    sums = _Sums()
    for (offset, shape), one in a.boxes(key, SLICE_BYTES):
        other = b.box(key, offset, shape)
        for part, part_other in zip(chunks(one), chunks(other), strict=True):
            numbers, numbers_other = as_numbers(one_type, part), as_numbers(other_type, part_other)
            same_type = one_type == other_type
            differs = _other_bits(part, part_other) if same_type else _other_values(numbers, numbers_other)
            sums.add(numbers, numbers_other, differs)
        if equal_bytes <= 0:
            read(one.nbytes + other.nbytes)
        equal_bytes -= one.nbytes
    return sums.gathered()


def _bits(elements: np.ndarray) -> np.ndarray:
    """Return the elements as unsigned integers with the same bits; elements of 16 bytes become two integers."""
    return elements.reshape(-1).view(np.dtype(f"u{min(elements.itemsize, 8)}"))


def _other_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    differs: np.ndarray = _bits(one) != _bits(other)
    if differs.size > one.size:
        differs = np.logical_or.reduce(differs.reshape(one.size, -1), axis=1)
    return differs


def _other_values(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    differs: np.ndarray = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return differs


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return |other - one| as float64. Subtracts integers as integers, as float64 cannot represent 2^60 + 1."""
    if one.dtype == other.dtype and one.dtype.kind in "iu":
        unsigned = np.dtype(f"u{one.itemsize}")
        # Modulo 2^bits, the larger minus the smaller number is the distance, regardless of their signs.
        forth, back = other.view(unsigned) - one.view(unsigned), one.view(unsigned) - other.view(unsigned)
        return np.where(other > one, forth, back).astype(np.float64)
    wide = np.complex128 if one.dtype.kind == "c" or other.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):  # infinity minus infinity is NaN, and counts as NaN
        return np.abs(reals(other.astype(wide) - one.astype(wide)))


def value_differences(a: Manifest, b: Manifest, patterns: Sequence[str] = ()) -> list[ValueDifference]:
    """Return the differences of all non-tensor values, sorted by key; training state keys start with `state`."""
    one, other = _values_of(a), _values_of(b)
    paths = sorted({*one, *other}, key=lambda path: in_order("".join(path)))
    return [
        ValueDifference("".join(path), one.get(path, MISSING), other.get(path, MISSING))
        for path in paths
        if matches("".join(path), patterns) and not _same(one.get(path, MISSING), other.get(path, MISSING))
    ]


def _values_of(manifest: Manifest) -> dict[tuple[str, ...], Any]:
    """Return all leaf values by the parts of their paths, as keys may contain dots. A list of scalars is one leaf."""
    values: dict[tuple[str, ...], Any] = {}
    rest: list[tuple[tuple[str, ...], Any]] = [((key, ""), record.value) for key, record in manifest.objects.items()]
    if manifest.state:
        rest.append((("state",), manifest.state))
    while rest:
        path, value = rest.pop()
        if isinstance(value, dict) and value:
            rest += [
                ((*path, f".{key}" if isinstance(key, str) else f"[{key!r}]"), item) for key, item in value.items()
            ]
        elif isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
            rest += [((*path, f"[{number}]"), item) for number, item in enumerate(value)]
        else:
            values[path] = value
    return values


def _same(one: Any, other: Any) -> bool:
    """Return whether type and repr are equal, so that 1, 1.0 and True differ and NaN equals itself."""
    return type(one) is type(other) and repr(one) == repr(other)
