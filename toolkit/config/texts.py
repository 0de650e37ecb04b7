"""Parse values that are strings (from variables, --set and flags) according to the type of their key."""

import tomllib
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from toolkit.config.document import KeyPath
from toolkit.config.refusal import ARGUMENTS_FIX, field_named, key_names, table_model
from toolkit.config.resolved import JobFile
from toolkit.config.table import form_of, nearest
from toolkit.errors import ToolkitError

__all__ = ["TABLES", "read_text"]

# A list of tables, such as the components, can only be set in the job file.
TABLES = tuple(name for name in key_names(JobFile) if get_origin(JobFile.model_fields[name].annotation) is not list)


def read_text(path: KeyPath, text: str, *, where: str) -> Any:
    """Parse `text` according to the type of the key `path`; values of [args] are TOML, or else strings.

    A string may be in quotes, as in a file, but the value of a variable (`env.vars.NAME`) is used unchanged.

    Raises:
        ToolkitError: the key does not exist, or does not accept the value.
    """
    place = f"{where}:{'.'.join(path)}"
    if path[0] == "args":
        try:
            return _toml_value(text, otherwise=text)
        except (RecursionError, ValueError) as error:  # too deep nesting, or an integer with too many digits
            raise ToolkitError(
                f"cannot parse the value: {error}", where=place, fix="quote the value, so that it is a string"
            ) from error
    annotation, form = _type_of(path, where)
    kinds = _kinds(annotation)
    if len(path) == 2 and (str in kinds or kinds == [list]):
        text = _unquoted(text)
    if kinds == [list] and not text.startswith("["):
        return [text]  # allow `--set data.paths=a.txt` for a list with one element
    for kind in kinds:
        try:
            return _READERS[kind](text)
        except (RecursionError, ValueError):
            continue
    raise ToolkitError(f"{text!r} is not a valid value for this key", where=place, fix=f"use {form}")


@lru_cache(maxsize=64)  # a sweep sets few keys, but each of them thousands of times
def _type_of(path: KeyPath, where: str) -> tuple[Any, str]:
    """Return the type of the key `path` and a description of the values that it accepts."""
    table = field_named(JobFile, path[0])
    if table and get_origin(table.annotation) is list:
        raise ToolkitError(
            f"the tables [[{path[0]}]] can only be set in the job file", where=where, fix=f"write [[{path[0]}]] there"
        )
    model = table_model(table.annotation) if table else None
    if model is None:
        raise _no_such_key(path[0], TABLES, path, where)
    field = field_named(model, path[1]) if len(path) > 1 else None
    if field is None:
        raise _no_such_key(path[1] if len(path) > 1 else "", key_names(model), path, where)
    if len(path) == 2:
        return field.annotation, form_of(field)
    inner = table_model(field.annotation)
    if inner is not None:
        nested = field_named(inner, path[3]) if len(path) == 4 else None
        if nested is None:
            raise _no_such_key(path[-1], key_names(inner), path, where)
        return nested.annotation, form_of(nested)
    if get_origin(field.annotation) is not dict:
        raise ToolkitError(f"{'.'.join(path[:2])} has no keys", where=where, fix=f"set {'.'.join(path[:2])} itself")
    return get_args(field.annotation)[1], "a string"


def _no_such_key(name: str, known: tuple[str, ...] | list[str], path: KeyPath, where: str) -> ToolkitError:
    prefix = ".".join(path[:1]) + "." if len(path) > 1 and known is not TABLES else ""
    close = nearest(name, known)
    if path[0] == "argv":
        return ToolkitError(f"unknown key {'.'.join(path)!r}", where=where, fix=ARGUMENTS_FIX)
    fix = f"write {prefix}{close[0]}" if close else f"use one of {', '.join(prefix + one for one in known)}"
    return ToolkitError(f"unknown key {'.'.join(path)!r}", where=where, fix=fix)


def _kinds(annotation: Any) -> list[type]:
    """Return the types to parse a string as, in order; `str` is last, because it accepts every string."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        kinds = {kind for member in get_args(annotation) for kind in _kinds(member)}
        return [kind for kind in _READERS if kind in kinds]
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return [type(get_args(annotation)[0])]
    return [origin or annotation]


def _unquoted(text: str) -> str:
    """Return the content of `text` if it is one quoted TOML string; otherwise return it unchanged."""
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return text
    value = _toml_value(text, otherwise=text)
    return value if isinstance(value, str) else text


def _read_bool(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _read_list(text: str) -> list[Any]:
    if not text.startswith("["):
        raise ValueError(text)
    value = _toml_value(text, otherwise=None)
    if not isinstance(value, list):
        raise ValueError(text)
    return value


def _read_table(text: str) -> dict[str, Any]:
    value = _toml_value(text, otherwise=None)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _toml_value(text: str, *, otherwise: Any) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return otherwise
    return values["value"] if set(values) == {"value"} else otherwise


_READERS: dict[type, Any] = {bool: _read_bool, int: int, float: float, list: _read_list, dict: _read_table, str: str}
