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
    """`values` has shape (batch, length, ...), `lengths` (batch,) int64; `mask` (batch, length) is True for real
    entries.
    """

    values: Tensor
    lengths: Tensor
    mask: Tensor


def pad_to_multiple(sequences: Sequence[Tensor | ArrayLike], multiple: int = 1, value: float = 0) -> Padded:
    """Put sequences into one tensor, as long as the longest and then up to a multiple of `multiple`.

    Lengths that divide by 8 or 64 suit a GPU's matrix units, and few different lengths spare a compiler its work. Each
    sequence has shape (its length, ...); all are of one type, and of one shape behind the first dimension.

    Raises:
        ToolkitError: there is no sequence, or they do not fit together.
    """
    if multiple < 1:
        raise ToolkitError(f"no length is a multiple of {multiple}", where="multiple", fix="choose 1 or more")
    if not sequences:
        raise ToolkitError("no sequence to pad", where="pad_to_multiple", fix="pass 1 or more sequences")
    tensors = [one if isinstance(one, Tensor) else torch.as_tensor(one) for one in sequences]
    kinds = {(one.dtype, tuple(one.shape[1:])) for one in tensors if one.dim()}
    if len(kinds) != 1 or not all(one.dim() for one in tensors):
        shapes = ", ".join(sorted({f"{one.dtype} {tuple(one.shape)}" for one in tensors})[:4])
        raise ToolkitError(
            f"the sequences do not fit together: {shapes}",
            where="pad_to_multiple",
            fix="pass sequences of one type that differ only in the first dimension",
        )
    lengths = torch.tensor([len(one) for one in tensors])
    longest = max(1, -(-int(lengths.max()) // multiple)) * multiple
    mask = torch.arange(longest) < lengths[:, None]
    values = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), value)
    values[mask] = torch.cat(tensors)
    return Padded(values, lengths, mask)


@dataclass(frozen=True)
class PadSamples:
    """A `collate`: pads sequences into a `Padded`, each entry of tuples and dicts by itself, and stacks the rest.

    `value` is the padding; `values` overrides it by the name or number of an entry: `{"labels": -100}`.
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
