"""A model that runs on torch's "meta" device, where tensors have shapes and no values: not every model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from toolkit.errors import ToolkitError


@contextmanager
def on_shapes_alone(model: nn.Module, cannot: str, *, where: str, fix: str) -> Iterator[None]:
    """Within, a model runs on shapes; where it cannot, that is said with the words of whatever refused.

    There is no narrower error than torch's RuntimeError: reading a value, an operation without a meta kernel and a
    third-party kernel that needs a GPU raise it, each with its own message. A mistake in the model is one, too,
    and comes again, by itself, when the model runs on values.

    Raises:
        ToolkitError: `cannot`, the first line of what was raised, and the `fix`.
    """
    try:
        yield
    except RuntimeError as error:
        said, *_ = str(error).splitlines() or [type(error).__name__]
        raise ToolkitError(f"{type(model).__name__} {cannot}: {said}", where=where, fix=fix) from error
