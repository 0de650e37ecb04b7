"""Run a model on torch's meta device, where tensors have shapes, but neither values nor memory."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from toolkit.errors import ToolkitError, first_line

__all__ = ["on_meta", "on_shapes_alone"]


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters and buffers on the meta device, where they use no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


@contextmanager
def on_shapes_alone(model: nn.Module, cannot: str, *, where: str, fix: str) -> Iterator[None]:
    """Context for running a model on the meta device; reports a failure with the message of its cause.

    torch raises a plain RuntimeError for reading a value, for an operation without a meta kernel and for a kernel that
    needs a GPU. A bug in the model raises one, too, and recurs when the model runs on a real device.

    Raises:
        ToolkitError: the model failed; the message contains `cannot` and the first line of the cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise ToolkitError(f"{type(model).__name__} {cannot}: {first_line(error)}", where=where, fix=fix) from error
