"""torch tensors as numpy arrays with the same bits."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.checkpoint.elements import element
from toolkit.errors import ToolkitError


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name of a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor, name: str) -> np.ndarray:
    """A tensor as numpy of its element's `memory` type, C-contiguous; shares memory where it can.

    Raises:
        ToolkitError: for element types and layouts that the format does not hold.
    """
    kind = element(dtype_name(tensor.dtype), where=name)
    if tensor.layout != torch.strided:
        raise ToolkitError(f"layout {tensor.layout} cannot be stored", where=name, fix="call .to_dense() first")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = tuple(plain.shape)
    # Through bytes: numpy has no bfloat16 and torch no view of it that numpy would take.
    return plain.reshape(-1).view(torch.uint8).numpy().view(kind.memory).reshape(shape)
