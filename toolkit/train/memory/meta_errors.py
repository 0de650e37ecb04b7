"""Errors of models that cannot run on torch's meta device, where tensors have shapes but no values."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from toolkit.errors import ToolkitError


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
        said, *_ = str(error).splitlines() or [type(error).__name__]
        raise ToolkitError(f"{type(model).__name__} {cannot}: {said}", where=where, fix=fix) from error
