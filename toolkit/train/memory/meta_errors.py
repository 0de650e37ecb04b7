"""Errors of models that do not run on torch's "meta" device, where tensors have shapes and no values."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from toolkit.errors import ToolkitError


@contextmanager
def on_shapes_alone(model: nn.Module, cannot: str, *, where: str, fix: str) -> Iterator[None]:
    """Run a model on shapes inside this context; report a failure with the message of its cause.

    torch raises a plain RuntimeError for reading a value, for an operation without a meta kernel and for a kernel that
    needs a GPU. A mistake in the model raises one, too, and recurs when the model runs on values.

    Raises:
        ToolkitError: `cannot`, the first line of the cause, and the `fix`.
    """
    try:
        yield
    except RuntimeError as error:
        said, *_ = str(error).splitlines() or [type(error).__name__]
        raise ToolkitError(f"{type(model).__name__} {cannot}: {said}", where=where, fix=fix) from error
