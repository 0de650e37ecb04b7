"""Converts torch tensors for the checkpoint format: data as numpy arrays or bytes, type names, device meshes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.format.elements import element
from toolkit.errors import ToolkitError
from toolkit.version import VERSION


def written_by() -> str:
    """Return the toolkit and torch versions, as recorded in the manifest."""
    return f"toolkit {VERSION}, torch {torch.__version__}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_layout(tensor: torch.Tensor, name: str) -> None:
    """Raise a ToolkitError for a tensor that is not a dense array with data."""
    if tensor.layout != torch.strided:
        raise ToolkitError(f"tensor layout {tensor.layout} cannot be stored", where=name, fix="call .to_dense() first")
    if tensor.is_meta:
        raise ToolkitError("a tensor on the device meta has no data", where=name, fix="initialize the tensor first")


def refuse_nested(flat: Mapping[str, Any]) -> None:
    """Raise a ToolkitError for a nested tensor, which has no shape although its layout may be strided."""
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ToolkitError(
                "is a nested tensor, which a checkpoint cannot contain",
                where=name,
                fix="pass the tensors that .unbind() returns as a list",
            )


def as_numpy(tensor: torch.Tensor, name: str) -> np.ndarray:
    """Return a C-contiguous `Element.memory` array, sharing memory if possible. Raises ToolkitError if unsupported."""
    kind = element(dtype_name(tensor.dtype), where=name)
    check_layout(tensor, name)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = tuple(plain.shape)
    # Viewed as bytes first: numpy has no bfloat16, and torch refuses to convert such a tensor.
    return _flat(plain).view(torch.uint8).numpy().view(kind.memory).reshape(shape)


def _flat(plain: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in one dimension; torch cannot view the bytes of a single element with a stride."""
    flat = plain.view(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def bytes_of(tensor: torch.Tensor, name: str) -> memoryview:
    """Return the bytes of a tensor in C order in host memory, shared if possible; errors as in `as_numpy`."""
    plain = tensor.detach()
    on_cpu = plain.layout == torch.strided and plain.device.type == "cpu"
    if on_cpu and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        # A fast path for the common case, because the checks of `as_numpy` take longer.
        element(dtype_name(plain.dtype), where=name)
        return _flat(plain).view(torch.uint8).numpy().data
    return as_numpy(plain, name).reshape(-1).view(np.uint8).data


# For types that numpy lacks: an integer type of the same size, by the size in bytes.
_STAND_INS = {2: torch.int16, 1: torch.uint8, 4: torch.int32}


def shared_numpy(tensor: torch.Tensor) -> np.ndarray | None:
    """Return a numpy view of a CPU tensor with the same memory, strides and element size, or None if impossible."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if not plain.is_cpu or plain.layout != torch.strided or plain.is_conj() or plain.is_neg():
        return None
    try:
        return plain.numpy()
    except TypeError:  # numpy lacks the type
        return plain.view(_STAND_INS[plain.element_size()]).numpy()


def meshes_of(tensors: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the distinct device meshes of the DTensors among `tensors`: the names and sizes of their dimensions."""
    meshes: list[dict[str, Any]] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            described = {"dims": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)}
            if described not in meshes:
                meshes.append(described)
    return meshes


def is_unchanged(planner: object, base: type, *methods: str) -> bool:
    """Return whether a DCP planner of class `base` does not override these methods."""
    return isinstance(planner, base) and all(getattr(type(planner), name) is getattr(base, name) for name in methods)


def rank_here() -> int:
    """Return torch's rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def refuse_no_dict(value: object, where: str) -> None:
    """Raise a ToolkitError unless `value` is a dict."""
    if not isinstance(value, Mapping):
        fix = 'pass a dict of tensors, as in {"model": model.state_dict()}' if where == "tensors" else "pass a dict"
        raise ToolkitError(f"expected a dict, got {type(value).__name__}", where=where, fix=fix)
