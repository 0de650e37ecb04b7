"""Properties of torch tensors for the format: their bits as numpy or bytes, names of types, meshes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.format.elements import element
from toolkit.errors import ToolkitError
from toolkit.version import VERSION


def written_by() -> str:
    """The versions that write a checkpoint, for its manifest."""
    return f"toolkit {VERSION}, torch {torch.__version__}"


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name of a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_layout(tensor: torch.Tensor, name: str) -> None:
    """Raise a ToolkitError for a tensor that is not a dense array."""
    if tensor.layout != torch.strided:
        raise ToolkitError(f"layout {tensor.layout} cannot be stored", where=name, fix="call .to_dense() first")


def refuse_nested(flat: Mapping[str, Any]) -> None:
    """Raise a ToolkitError for a nested tensor, which can report that it is strided, and has no shape."""
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ToolkitError(
                "is a nested tensor, which a checkpoint cannot contain",
                where=name,
                fix="pass the list of its .unbind()",
            )


def as_numpy(tensor: torch.Tensor, name: str) -> np.ndarray:
    """A C-contiguous array of the element's `memory` type, shared if possible; ToolkitError if not supported."""
    kind = element(dtype_name(tensor.dtype), where=name)
    check_layout(tensor, name)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = tuple(plain.shape)
    # Through bytes: numpy has no bfloat16, and accepts no other view of such a tensor.
    return plain.reshape(-1).view(torch.uint8).numpy().view(kind.memory).reshape(shape)


def bytes_of(tensor: torch.Tensor, name: str) -> memoryview:
    """A tensor's bytes in C order, on the CPU, shared if possible; errors as in `as_numpy`."""
    plain = tensor.detach()
    on_cpu = plain.layout == torch.strided and plain.device.type == "cpu"
    if on_cpu and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        # The common case: the checks of `as_numpy` take longer.
        element(dtype_name(plain.dtype), where=name)
        return plain.view(-1).view(torch.uint8).numpy().data
    return as_numpy(plain, name).reshape(-1).view(np.uint8).data


# Types of the same size, for types that numpy lacks.
_STAND_INS = {2: torch.int16, 1: torch.uint8, 4: torch.int32}


def shared_numpy(tensor: torch.Tensor) -> np.ndarray | None:
    """A tensor of the CPU as numpy with the same memory, strides and size of element; None if there is no such view."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or plain.layout != torch.strided or plain.is_conj() or plain.is_neg():
        return None
    try:
        return plain.numpy()
    except TypeError:  # a type that numpy lacks
        return plain.view(_STAND_INS[plain.element_size()]).numpy()


def meshes_of(tensors: Iterable[Any]) -> list[dict[str, Any]]:
    """The distinct device meshes of the DTensors among `tensors`: their dimensions' names and sizes."""
    meshes: list[dict[str, Any]] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            described = {"dims": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)}
            if described not in meshes:
                meshes.append(described)
    return meshes


def refuse_no_dict(value: object, where: str) -> None:
    """Raise a ToolkitError unless `value` is a dict."""
    if not isinstance(value, Mapping):
        fix = (
            'pass a dict by name, as in {"model": model.state_dict()}' if where == "tensors" else "pass a dict by name"
        )
        raise ToolkitError(f"expected a dict, got a {type(value).__name__}", where=where, fix=fix)
