"""Collate sequences of different lengths: padded, with lengths and a mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import default_collate

from toolkit.errors import ToolkitError


class Padded(NamedTuple):
    """`values` is (batch, length, ...), `lengths` (batch,) int64, `mask` (batch, length) with True for real entries."""

    values: Tensor
    lengths: Tensor
    mask: Tensor


def pad_to_multiple(sequences: Sequence[Tensor | ArrayLike], multiple: int = 1, value: float = 0) -> Padded:
    """Pad sequences to the length of the longest one, rounded up to a multiple of `multiple`.

    Multiples of 8 or 64 suit GPU matrix units, and fewer different lengths cause fewer recompilations. A sequence has
    shape (length, ...); all must have the same dtype and the same shape after the first dimension.

    Raises:
        ToolkitError: there are no sequences, or their dtypes or shapes differ.
    """
    if multiple < 1:
        raise ToolkitError(f"expected 1 or more, got {multiple}", where="multiple", fix="set multiple to 1 or more")
    if not sequences:
        raise ToolkitError("no sequences to pad", where="pad_to_multiple", fix="pass 1 or more sequences")
    tensors = [one if isinstance(one, Tensor) else torch.as_tensor(one) for one in sequences]
    kinds = {(one.dtype, tuple(one.shape[1:])) for one in tensors if one.dim()}
    if len(kinds) != 1 or not all(one.dim() for one in tensors):
        shapes = ", ".join(sorted({f"{one.dtype} {tuple(one.shape)}" for one in tensors})[:4])
        raise ToolkitError(
            f"expected sequences that differ only in length, got {shapes}",
            where="pad_to_multiple",
            fix="pass sequences of one dtype that differ only in the first dimension",
        )
    lengths = torch.tensor([len(one) for one in tensors])
    longest = max(1, -(-int(lengths.max()) // multiple)) * multiple
    mask = torch.arange(longest) < lengths[:, None]
    values = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), value)
    values[mask] = torch.cat(tensors)
    return Padded(values, lengths, mask)


@dataclass(frozen=True)
class PadSamples:
    """A `collate` that pads sequences into a `Padded`, separately for each entry of tuples and dicts.

    Other entries are stacked. `value` is the padding value; `values` overrides it by the key or index of an entry, such
    as `{"labels": -100}`.
    """

    multiple: int = 1
    value: float = 0
    values: dict[Any, float] | None = None

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0]
        if isinstance(first, dict):
            return {name: self._entry(name, [sample[name] for sample in samples]) for name in first}
        if isinstance(first, tuple):
            return tuple(
                self._entry(number, list(entries)) for number, entries in enumerate(zip(*samples, strict=True))
            )
        return self._entry(None, samples)

    def _entry(self, name: Any, entries: Sequence[Any]) -> Any:
        first = entries[0]
        if isinstance(first, str | bytes) or not hasattr(first, "__len__") or getattr(first, "ndim", 1) == 0:
            return default_collate(list(entries))
        return pad_to_multiple(entries, self.multiple, (self.values or {}).get(name, self.value))
