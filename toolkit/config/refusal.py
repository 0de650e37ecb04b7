"""pydantic's complaint about one value, said as ours: what is wrong, file:line:key, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toolkit.config.lines import KeyPath
from toolkit.config.table import Table, form_of, nearest
from toolkit.errors import ToolkitError


def refusal(error: ValidationError, model: type[BaseModel], place: Callable[[KeyPath], str]) -> ToolkitError:
    """Turn the first complaint of `error` about `model` into one line; `place` says where a key stands."""
    details = error.errors(include_url=False)
    first = details[0]
    path, field = _known_path(model, tuple(str(part) for part in first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if (
        "|" in message and first["type"] == "value_error"
    ):  # A table's check names the key in front of the bar.
        name, message = message.split("|", 1)
        path, field = _known_path(model, (*path, name))
    keys = {_known_path(model, tuple(str(part) for part in other["loc"]))[0] for other in details}
    more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
    where = f"{place(path)}:{'.'.join(path)}"
    if first["type"] == "extra_forbidden":
        said, fix = _unknown(model, path)
    elif first["type"] == "missing":
        said, fix = "is missing", f"add {path[-1]} = {form_of(field) if field else '...'}"
    else:
        said = _said(first, message)
        fix = f"give {form_of(field)}" if field else "see `toolkit config schema`"
    return ToolkitError(said + more, where=where, fix=fix)


def _said(details: ErrorDetails, message: str) -> str:
    value = details["input"]
    if details["type"] in ("value_error", "assertion_error"):
        if isinstance(value, dict) or message.startswith(repr(value)):
            return message
        return f"{value!r} {message}"
    return f"{value!r} is refused: {message[:1].lower()}{message[1:]}"


def _known_path(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, FieldInfo | None]:
    """Cut pydantic's own additions (the member of a union, the index of a list) off a location."""
    path: KeyPath = ()
    field: FieldInfo | None = None
    inner: Any = model
    for part in location:
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            if get_origin(inner) is not dict:
                break
            path, inner = (*path, part), get_args(inner)[1]
            continue
        field = field_named(inner, part)
        path = (*path, part)
        if field is None:
            break
        inner = field.annotation
    return path, field


def field_named(model: type[BaseModel], name: str) -> FieldInfo | None:
    """Return the field that stands as `name` in a file."""
    for attribute, field in model.model_fields.items():
        if name == (field.alias or attribute):
            return field
    return None


def key_names(model: type[BaseModel]) -> list[str]:
    """Return the keys of `model` as a file writes them."""
    return [field.alias or attribute for attribute, field in model.model_fields.items()]


def table_model(annotation: Any) -> type[Table] | None:
    """Return the table type of a field, also of a table of tables; None for any other field."""
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def _unknown(model: type[BaseModel], path: KeyPath) -> tuple[str, str]:
    *tables, name = path
    owner: type[BaseModel] = model
    for table in tables:
        field = field_named(owner, table)
        owner = (table_model(field.annotation) if field else None) or owner
    known = key_names(owner)
    said = (
        f"there is no key {name!r} in [{'.'.join(tables)}]"
        if tables
        else f"there is no key or table {name!r}"
    )
    if close := nearest(name, known):
        return said, f"write {close[0]!r}"
    for table in key_names(model):
        field = field_named(model, table)
        other = table_model(field.annotation) if field else None
        if other and name in key_names(other):
            return said, f"move it to [{table}]"
    return said, f"remove it, or write one of {', '.join(known)}"
