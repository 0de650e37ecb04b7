"""Values that are not tensors, as JSON that gives back exactly what went in.

JSON has no tuples, no NaN and no keys other than strings, but optimizer state has all three. They are
tagged: `{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`. Anything else is refused
by name, so that a checkpoint never needs pickle.
"""

from __future__ import annotations

import math
from typing import Any

from toolkit.errors import ToolkitError

MOST_LEVELS = 100  # Python's own JSON, which stops at some hundreds, reads it back; no state has more than a few


def encode(value: object, where: str) -> Any:
    """`value` as JSON. `where` names the value in the error.

    Raises:
        ToolkitError: for a type that JSON cannot give back, naming its place, and for what holds itself.
    """
    try:
        return _encode(value, where, MOST_LEVELS)
    except _NoEndError:  # its own place would be a hundred brackets long
        raise too_deep(where) from None


class _NoEndError(Exception):
    """More levels than there may be."""


def too_deep(where: str) -> ToolkitError:
    """The refusal of what is nested too deep to be stored; a part of it that holds itself has no end."""
    return ToolkitError(
        f"holds itself, or is nested more than {MOST_LEVELS} levels deep",
        where=where,
        fix="leave that part out, or save it with fewer levels",
    )


def _encode(value: object, where: str, levels: int) -> Any:
    # Exact types: a subclass (numpy.float64, torch.Size, OrderedDict) would come back as its base.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple, dict) and not levels:
        raise _NoEndError
    if isinstance(value, list) and kind is list:
        return [_encode(item, f"{where}[{place}]", levels - 1) for place, item in enumerate(value)]
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": [_encode(item, f"{where}[{place}]", levels - 1) for place, item in enumerate(value)]}
    if isinstance(value, dict) and kind is dict:
        return _encode_dict(value, where, levels - 1)
    raise ToolkitError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored in a checkpoint",
        where=where,
        fix="pass a tensor, or plain numbers, strings, lists, tuples and dicts",
    )


def _encode_dict(value: dict[Any, Any], where: str, levels: int) -> dict[str, Any]:
    items = {key: _encode(item, f"{where}[{key!r}]", levels) for key, item in value.items()}
    if all(type(key) is str and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[_encode(key, f"a key of {where}", levels), item] for key, item in items.items()]}


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$dict" in value:
        return {decode(key): decode(item) for key, item in value["$dict"]}
    return {key: decode(item) for key, item in value.items()}
