"""Encodes non-tensor values as JSON that decodes to exactly the same values, so that checkpoints never need pickle.

Tags represent types that JSON lacks: `{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`, and
those in `typed_values`.
"""

import math
from typing import Any

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format.typed_values import TAGS, Typed, built, packed, refusal, tag_of
from toolkit.errors import ToolkitError

__all__ = ["encode", "restored"]

MOST_LEVELS = 100  # Python's json module fails at a few hundred levels; real states have only a few
_FLOATS = ("nan", "inf", "-inf")


def encode(value: object, where: str) -> Any:
    """Encode `value` as JSON. Raises ToolkitError with a path for an unsupported type, or a value inside itself."""
    try:
        return _encode(value, where, MOST_LEVELS)
    except _NoEndError:  # this is raised here, because the full path would contain a hundred brackets
        raise too_deep(where) from None


class _NoEndError(Exception):
    """A value has more than `MOST_LEVELS` levels."""


def too_deep(where: str) -> ToolkitError:
    """Return the error for a value with too many levels, such as one that contains itself."""
    return ToolkitError(
        f"contains a reference to itself, or is nested more than {MOST_LEVELS} levels deep",
        where=where,
        fix="omit this value, or save it with fewer levels",
    )


def _encode(value: object, where: str, levels: int) -> Any:
    # Only exact types, because a subclass (a named tuple, an IntEnum) would decode to its base class.
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
    if isinstance(value, Typed):
        return {value.tag: value.content}
    if (tag := tag_of(value)) is None:
        raise refusal(value, where)
    if not levels:
        raise _NoEndError
    return {tag: packed(value, tag, lambda item: _encode(item, f"{where}<{tag[1:]}>", levels - 1), where)}


def copied(value: object, where: str) -> Any:
    """Return a copy of `value` that later changes do not affect; `restored` reverses it. Raises as in `encode`."""
    return decode(encode(value, where), where)


def restored(value: object, where: str) -> Any:
    """Return a value that `decode` returned with the types that it had. Raises CorruptCheckpointError if damaged."""
    return built(value, decode, where)


def _encode_dict(value: dict[Any, Any], where: str, levels: int) -> dict[str, Any]:
    items = {key: _encode(item, f"{where}[{key!r}]", levels) for key, item in value.items()}
    if all(type(key) is str and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[_encode(key, f"a key of {where}", levels), item] for key, item in items.items()]}


def decode(value: Any, where: str) -> Any:
    """Decode the result of `encode`. Raises CorruptCheckpointError, naming `where`, for any other JSON."""
    try:
        return _decode(value, where)
    except RecursionError:
        raise CorruptCheckpointError(f"{where} is nested too deeply") from None


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
    if len(value) == 1 and tag in TAGS:
        return Typed(tag, content)
    raise CorruptCheckpointError(f"{where}: {value!r:.80} is not a valid value of this format")


def _decode_dict(pairs: list[Any], where: str) -> dict[Any, Any]:
    decoded: dict[Any, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptCheckpointError(f"{where}: expected a key and its value, got {pair!r:.80}")
        key = _decode(pair[0], f"a key of {where}")
        try:
            is_new = key not in decoded
        except TypeError:  # an unhashable key: a list, a dict, or a tuple that contains one
            is_new = False
        if not is_new:
            raise CorruptCheckpointError(f"{where}: {pair[0]!r:.80} is a duplicate or invalid key")
        decoded[key] = _decode(pair[1], f"{where}[{key!r}]")
    return decoded
