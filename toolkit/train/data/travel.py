"""Send a batch from a worker to its rank: small tensors as bytes, large ones in shared memory.

torch passes each tensor's memory by a file descriptor, which takes several messages. Up to some hundred KiB, sending
the bytes through the pipe is faster.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_BYTES = 512 << 10
_NO_NUMPY = (torch.bfloat16, torch.complex32)


class _Bytes(NamedTuple):
    array: NDArray[np.generic]


def packed(batch: Any) -> Any:
    """Return the batch with small tensors as arrays; called in the worker."""
    return each_tensor(batch, _packed)


def unpacked(batch: Any) -> Any:
    """Undo `packed`; called in the rank."""
    if isinstance(batch, _Bytes):
        return torch.from_numpy(batch.array)
    return _rebuilt(batch, unpacked)


def each_tensor(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the same tuples, lists and dicts with each tensor replaced."""
    if isinstance(batch, Tensor):
        return change(batch)
    return _rebuilt(batch, lambda one: each_tensor(one, change))


def _packed(tensor: Tensor) -> Any:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    fits = plain and tensor.numel() * tensor.element_size() <= MOST_BYTES
    if (
        not fits
        or tensor.requires_grad
        or tensor.dtype in _NO_NUMPY
        or (tensor.dtype.itemsize == 1 and tensor.is_floating_point())
    ):
        return tensor
    return _Bytes(np.ascontiguousarray(tensor.numpy()) if tensor.dim() else tensor.numpy().copy())


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if type(batch) in (list, tuple):
        return type(batch)(map(change, batch))
    if type(batch) is dict:
        return {name: change(one) for name, one in batch.items()}
    return batch
