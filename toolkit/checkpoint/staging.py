"""A state's copy in memory that is kept from save to save, so that training goes on while it is written.

New memory costs more than the copy: the system hands out each page with zeros in it. So the buffer stays, and a save
waits for one copy at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.checkpoint.tensors import check_layout

_ALIGNMENT_BYTES = 64  # a cache line, and enough for every type


class StagingBuffer:
    """Host memory for one state, pinned where a device copies into it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[memoryview]:
        """Copy named tensors, and return the bytes of each; the views last until the next call.

        Raises:
            ToolkitError: a tensor's layout cannot be stored.
        """
        plain = [_strided(name, tensor) for name, tensor in tensors]
        starts, size = _places(plain)
        devices = {tensor.device for tensor in plain if tensor.device.type != "cpu"}
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        views = []
        for tensor, start in zip(plain, starts, strict=True):
            place = self._bytes[start : start + tensor.nbytes]
            if tensor.numel():
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            views.append(place.numpy().data)
        for device in devices:
            torch.accelerator.synchronize(device)
        return views


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each begins, and how much all take."""
    starts, position = [], 0
    for tensor in tensors:
        starts.append(position)
        position += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts, position


def _strided(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_layout(tensor, name)
    return tensor.detach()
