"""Values other than tensors as JSON that decodes to exactly the same values, so that a checkpoint never needs pickle.

Tags represent what JSON lacks: `{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`.
"""

import math
from typing import Any

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.errors import ToolkitError

__all__ = ["encode"]

MOST_LEVELS = 100  # Python's own JSON fails at some hundreds; no state has more than a few
_FLOATS = ("nan", "inf", "-inf")


def encode(value: object, where: str) -> Any:
    """`value` as JSON; ToolkitError with its path if a type is not representable, or a value contains itself."""
    try:
        return _encode(value, where, MOST_LEVELS)
    except _NoEndError:  # its own path would be a hundred brackets long
        raise too_deep(where) from None


class _NoEndError(Exception):
    """More levels than `MOST_LEVELS`."""


def too_deep(where: str) -> ToolkitError:
    """The error for a value with too many levels; one that contains itself has infinitely many."""
    return ToolkitError(
        f"contains a reference to itself, or is nested more than {MOST_LEVELS} levels deep",
        where=where,
        fix="omit that part, or save it with fewer levels",
    )


def _encode(value: object, where: str, levels: int) -> Any:
    # Exact types: a subclass (numpy.float64, torch.Size, OrderedDict) would decode to its base.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple, dict) and not levels:
        raise _NoEndError
    if isinstance(value, list) and kind is list:
        return [_encode(item, f"{where}[{index}]", levels - 1) for index, item in enumerate(value)]
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": [_encode(item, f"{where}[{index}]", levels - 1) for index, item in enumerate(value)]}
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


def decode(value: Any, where: str) -> Any:
    """The value that `encode` was given; CorruptCheckpointError for other JSON, with `where` in its message."""
    try:
        return _decode(value, where)
    except RecursionError:
        raise CorruptCheckpointError(f"{where}: is nested too deep") from None


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, f"{where}[{key!r}]") for key, item in value.items()}
    content = value[tag]
    if len(value) == 1 and tag == "$float" and content in _FLOATS:
        return float(content)
    if len(value) == 1 and tag == "$tuple" and isinstance(content, list):
        return tuple(_decode(item, where) for item in content)
    if len(value) == 1 and tag == "$dict" and isinstance(content, list):
        return _decode_dict(content, where)
    raise CorruptCheckpointError(f"{where}: {value!r:.80} is not a valid value of this format")


def _decode_dict(pairs: list[Any], where: str) -> dict[Any, Any]:
    decoded: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptCheckpointError(f"{where}: expected a key and its value, got {pair!r:.80}")
        key = _decode(pair[0], f"a key of {where}")
        try:
            is_new = key not in decoded
        except TypeError:  # a list or a dict, or a tuple of them
            is_new = False
        if not is_new:
            raise CorruptCheckpointError(f"{where}: {pair[0]!r:.80} is a duplicate key, or not a valid key")
        decoded[key] = _decode(pair[1], f"{where}[{key!r}]")
    return decoded
