"""A buffer for copies of a state, reused by every save, because allocating zeroed pages costs more than the copy."""

import ctypes
from collections.abc import Sequence

import torch

from toolkit.checkpoint.tensors import check_layout

_ALIGNMENT_BYTES = 64  # the size of a cache line, which is enough for every type


class StagingBuffer:
    """Host memory for one state, pinned if a device copies into it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[memoryview]:
        """Copy the tensors and return their bytes, valid until the next call. Raises ToolkitError for a bad layout."""
        plain = [_strided(name, tensor) for name, tensor in tensors]
        starts, size = _places(plain)
        devices = {tensor.device for tensor in plain if tensor.device.type != "cpu"}
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # release the old buffer before the larger allocation
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        whole, address = self._bytes.numpy().data, self._bytes.data_ptr()
        views = []
        for tensor, start in zip(plain, starts, strict=True):
            end = start + tensor.nbytes
            if _is_plain_memory(tensor):  # memmove avoids torch's overhead per tensor
                ctypes.memmove(address + start, tensor.data_ptr(), tensor.nbytes)
            elif tensor.numel():
                self._bytes[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append(whole[start:end])
        for device in devices:
            torch.accelerator.synchronize(device)
        return views


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the first byte of each tensor, and the total size."""
    starts, position = [], 0
    for tensor in tensors:
        starts.append(position)
        position += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts, position


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is in host memory, in exactly the bytes that are stored."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _strided(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_layout(tensor, name)
    return tensor.detach()
