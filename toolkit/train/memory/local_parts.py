"""This rank's parts of tensors, which may be sharded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["bytes_on", "like_parameter", "local_of"]


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is sharded like the parameter, if that is, with this rank's part, on whatever device."""
    # The constructor, unlike `from_local`, leaves a part on the CPU although the mesh is one of GPUs.
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local


def bytes_on(device: torch.device, tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages on a device; FSDP2 and DDP let many gradients share one."""
    storages = [own.untyped_storage() for own in map(local_of, tensors) if own.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
