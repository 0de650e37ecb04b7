"""Values of types that JSON lacks, as tagged JSON: `{"$set": [...]}`, `{"$numpy": [dtype, shape, base64]}`.

Reading a manifest keeps such a value as `Typed`, so that commands without torch can show and compare it. `built` makes
the value itself. No entry of a manifest can name a class or function that is not in `_KINDS`.
"""

import sys
from base64 import b64decode, b64encode
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from importlib import import_module
from math import prod
from pathlib import PosixPath, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.errors import ToolkitError

__all__ = ["Typed", "built"]

MOST_BYTES = 64 << 20  # of one array or string of bytes: rank 0 writes the manifest, and every rank reads all of it
_NUMPY_KINDS = "biufcSUmM"  # numpy's kinds of plain elements: neither objects nor records
_FIX = "store numbers, strings, tensors, or containers of them; or give the object state_dict() and load_state_dict()"


@dataclass(frozen=True)
class Typed:
    """A value as the manifest contains it: `content` is JSON, in which other `Typed` values may be nested as tags."""

    tag: str
    content: Any = field(hash=False)


class _Kind(NamedTuple):
    """Types that share a tag. `pack` returns the content, given a function for nested values; `build` reverses it."""

    types: str
    pack: Callable[[Any, Callable[[Any], Any]], Any]
    build: Callable[[Any, Callable[[Any], Any]], Any]


def _written(types: str, build: Callable[[str], Any], pack: Callable[[Any], Any] = str) -> _Kind:
    """Return a kind whose content is a string, or a list of numbers, from which `build` makes the value."""

    def checked(value: Any, _: Callable[[Any], Any]) -> Any:
        content = pack(value)
        if repr(build(content)) != repr(value):  # such as a time in a named time zone
            raise ValueError(f"{value!r:.80} would not be restored exactly")
        return content

    return _Kind(types, checked, lambda content, _: build(content))


def _container(types: str, build: Callable[[list[Any]], Any], pack: Callable[[Any], Any] = list) -> _Kind:
    return _Kind(
        types,
        lambda value, encode: [encode(item) for item in pack(value)],
        lambda content, decode: build([decode(item) for item in content]),
    )


def _check_size(count: int) -> None:
    if count > MOST_BYTES:
        raise ValueError(f"{count} bytes exceed the {MOST_BYTES} bytes of one value outside of dicts and lists")


def _packed_bytes(data: Any, _: object = None) -> str:
    _check_size(len(data))
    return b64encode(data).decode()


def _bytes(content: str, _: object = None) -> bytes:
    return b64decode(content, validate=True)


def _plain_numpy(kind: np.dtype) -> str:
    if kind.kind not in _NUMPY_KINDS or kind.subdtype:
        raise ValueError(f"numpy's type {kind} is not a plain number, time, string or bool")
    return kind.str


def _numpy_type(name: str) -> np.dtype:
    kind = np.dtype(str(name))
    _plain_numpy(kind)
    return kind


def _packed_array(array: Any, _: Callable[[Any], Any]) -> list[Any]:
    _check_size(array.nbytes)
    return [_plain_numpy(array.dtype), list(array.shape), _packed_bytes(array.tobytes())]


def _array(content: Any, _: Callable[[Any], Any]) -> np.ndarray:
    kind, shape, data = content
    return np.frombuffer(_bytes(data), _numpy_type(kind)).reshape(shape).copy()


def _packed_tensor(tensor: Any, _: Callable[[Any], Any]) -> list[Any]:
    from toolkit.checkpoint.tensors import bytes_of, dtype_name, refuse_nested

    refuse_nested({"": tensor})
    _check_size(tensor.numel() * tensor.element_size())  # an expanded view could need far more memory than it has
    data = _packed_bytes(bytes_of(tensor, ""))
    return [dtype_name(tensor.dtype), list(tensor.shape), data, str(tensor.device), tensor.requires_grad]


def _tensor(content: Any, _: Callable[[Any], Any]) -> Any:
    torch = _torch()
    dtype, shape, data, device, has_gradient = content
    plain = bytearray(_bytes(data))
    if min(shape, default=0) < 0 or len(plain) != prod(shape) * ELEMENTS[dtype].size_bytes:
        raise ValueError(f"{len(plain)} bytes are not a tensor of shape {shape}")
    kind = getattr(torch, dtype)
    tensor = torch.frombuffer(plain, dtype=torch.uint8).view(kind) if plain else torch.empty(0, dtype=kind)
    return tensor.reshape(shape).to(device).requires_grad_(has_gradient is True)


def _parameter(content: Any, decode: Callable[[Any], Any]) -> Any:
    tensor = _tensor(content, decode)
    return _torch().nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _torch() -> ModuleType:
    return import_module("torch")  # only when a value is built: commands that show a manifest need no torch


def _of_torch(kind: str) -> _Kind:
    """Return the kind of torch's constants of a class, by their names without "torch."."""

    def find(name: str) -> Any:
        found = getattr(_torch(), name)
        if type(found) is not getattr(_torch(), kind):
            raise ValueError(f"torch.{name} is not a {kind}")
        return found

    return _written(f"torch.{kind}", find, lambda value: str(value).removeprefix("torch."))


_KINDS = {
    "$bytes": _Kind("builtins.bytes", _packed_bytes, _bytes),
    "$bytearray": _Kind("builtins.bytearray", _packed_bytes, lambda content, decode: bytearray(_bytes(content))),
    "$complex": _written("builtins.complex", complex),
    "$set": _container("builtins.set", set),
    "$frozenset": _container("builtins.frozenset", frozenset),
    "$range": _written("builtins.range", lambda it: range(*it), lambda it: [it.start, it.stop, it.step]),
    "$slice": _container("builtins.slice", lambda it: slice(*it), lambda it: [it.start, it.stop, it.step]),
    "$deque": _container("collections.deque", lambda it: deque(it[1:], it[0]), lambda it: [it.maxlen, *it]),
    "$OrderedDict": _container("collections.OrderedDict", OrderedDict, lambda it: it.items()),
    "$datetime": _written("datetime.datetime", datetime.fromisoformat, datetime.isoformat),
    "$date": _written("datetime.date", date.fromisoformat),
    "$time": _written("datetime.time", time.fromisoformat),
    "$timedelta": _written(
        "datetime.timedelta", lambda it: timedelta(*it), lambda it: [it.days, it.seconds, it.microseconds]
    ),
    "$Decimal": _written("decimal.Decimal", Decimal),
    "$Fraction": _written("fractions.Fraction", Fraction),
    "$UUID": _written("uuid.UUID", UUID),
    "$Path": _written("pathlib.PosixPath pathlib._local.PosixPath", PosixPath),
    "$PurePath": _written("pathlib.PurePosixPath pathlib._local.PurePosixPath", PurePosixPath),
    "$numpy": _Kind("numpy.ndarray", _packed_array, _array),
    "$numpy.scalar": _Kind("", _packed_array, lambda content, decode: _array(content, decode)[()]),
    "$numpy.dtype": _Kind("", lambda value, _: _plain_numpy(value), lambda it, _: _numpy_type(it)),
    "$torch.Tensor": _Kind("torch.Tensor", _packed_tensor, _tensor),
    "$torch.Parameter": _Kind("torch.nn.parameter.Parameter", _packed_tensor, _parameter),
    "$torch.Size": _written("torch.Size", lambda it: _torch().Size(it), list),
    "$torch.dtype": _of_torch("dtype"),
    "$torch.device": _written("torch.device", lambda it: _torch().device(it)),
    "$torch.layout": _of_torch("layout"),
    "$torch.memory_format": _of_torch("memory_format"),
}
_TAGS = {name: tag for tag, kind in _KINDS.items() for name in kind.types.split()}
TAGS = frozenset(_KINDS)


def full_name(kind: type) -> str:
    """Return the name of a type with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def tag_of(value: object) -> str | None:
    """Return the tag for a value, or None. Only exact types have one: a subclass would become its base class."""
    kind = type(value)
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        return "$numpy.scalar"
    if isinstance(value, np.dtype):
        return "$numpy.dtype"
    tag = _TAGS.get(full_name(kind))
    is_itself = getattr(sys.modules.get(kind.__module__), kind.__name__, kind) is kind  # not another class of this name
    return tag if is_itself else None


def packed(value: object, tag: str, encode: Callable[[Any], Any], where: str) -> Any:
    """Return the JSON content of a value. Raises ToolkitError if it could not be restored exactly."""
    try:
        return _KINDS[tag].pack(value, encode)
    except ToolkitError as error:  # of a tensor in a container, without its place
        raise ToolkitError(error.message, where=error.where or where, fix=error.fix) from None
    except (ValueError, TypeError, AttributeError) as error:
        message = f"a value of type {full_name(type(value))} cannot be stored: {error}"
        raise ToolkitError(message, where=where, fix=_FIX) from None


def refusal(value: object, where: str) -> ToolkitError:
    """Return the error for a value of a type that cannot be stored."""
    fix = _FIX
    if isinstance(value, Enum):
        fix = "store its `.value` or `.name`: a load never imports the class of an enumeration"
    elif callable(value):
        fix = "store its name: a load never imports functions or classes"
    return ToolkitError(
        f"a value of type {full_name(type(value))} cannot be stored in a checkpoint", where=where, fix=fix
    )


def built(value: Any, decode: Callable[[Any, str], Any], where: str) -> Any:
    """Return `value` with every `Typed` in it built; `decode` is `jsonvalues.decode`.

    Raises CorruptCheckpointError for content that `packed` does not return, and ToolkitError if this host lacks a device.
    """
    if isinstance(value, Typed):
        try:
            return _KINDS[value.tag].build(value.content, lambda item: built(decode(item, where), decode, where))
        except RecursionError:
            raise CorruptCheckpointError(f"{where}: a {value.tag[1:]} is nested too deep") from None
        except RuntimeError as error:  # torch's error for a missing device, among others
            raise ToolkitError(f"a {value.tag[1:]} cannot be built: {error!s:.200}", where=where) from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise CorruptCheckpointError(f"{where}: a {value.tag[1:]} has invalid content: {error!s:.80}") from None
    if isinstance(value, (list, tuple)):
        return type(value)(built(item, decode, where) for item in value)
    if isinstance(value, dict):
        return {built(key, decode, where): built(item, decode, where) for key, item in value.items()}
    return value
