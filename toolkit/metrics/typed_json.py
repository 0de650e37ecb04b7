"""Read JSON into the frozen dataclasses that wrote it; the keys must match exactly. Standard library only."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, cast, get_args, get_origin, get_type_hints

from toolkit.errors import ToolkitError

__all__ = ["read_typed"]


def read_typed(value: Any, kind: Any, where: str, *, what: str, fix: str) -> Any:
    """Convert a JSON value to `kind`: a plain value, an optional one, or a tuple, dict or dataclass of such kinds.

    Raises:
        ToolkitError: the value does not match; the error names the position below `where`.
    """

    def read(value: Any, kind: Any, where: str) -> Any:
        if get_origin(kind) is types.UnionType:
            return None if value is None else read(value, get_args(kind)[0], where)
        if get_origin(kind) is tuple:
            if isinstance(value, list):
                return tuple(read(one, get_args(kind)[0], f"{where}[{number}]") for number, one in enumerate(value))
        elif get_origin(kind) is dict:
            if isinstance(value, dict):
                return {key: read(one, get_args(kind)[1], f"{where}:{key}") for key, one in value.items()}
        elif dataclasses.is_dataclass(kind):
            hints, made = get_type_hints(kind), cast(Callable[..., Any], kind)
            if isinstance(value, dict) and set(value) == set(hints):
                return made(**{key: read(value[key], hint, f"{where}:{key}") for key, hint in hints.items()})
        elif kind is float and type(value) in (int, float):
            return float(value)
        elif type(value) is kind:
            return value
        raise ToolkitError(f"{str(value)[:60]!r} is not a valid value at this position of {what}", where=where, fix=fix)

    return read(value, kind, where)
