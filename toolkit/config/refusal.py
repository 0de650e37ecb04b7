"""pydantic's error about one value as a ToolkitError: what is wrong, file:line:key, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toolkit.config.document import KeyPath, dotted
from toolkit.config.table import Table, form_of, nearest
from toolkit.errors import ToolkitError, all_of
from toolkit.slurm.sbatch_options import COMPONENTS_ELSEWHERE, COMPONENTS_FIX

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob

__all__ = ["refusal", "refuse"]

_COMPONENTS = ("component", "components", "hetjob")  # names that users of sbatch try for a heterogeneous job


def refuse(resolved: ResolvedJob, key: str, message: str, fix: str) -> ToolkitError:
    """The error about the value of a key, at the line or flag that set it."""
    return ToolkitError(message, where=resolved.origin(key).place(key), fix=fix)


def refusal(error: ValidationError, model: type[BaseModel], place: Callable[[KeyPath], str]) -> ToolkitError:
    """The errors of `error` about `model`, one line each; `place` returns where a key is."""
    mistakes: dict[KeyPath, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        path = _known_path(model, tuple(str(part) for part in one["loc"]))
        mistakes.setdefault(path, []).append(one)
    kinds = {path: details[0]["type"] for path, details in mistakes.items()}
    if "extra_forbidden" in kinds.values():
        # A missing key is usually the unknown one, misspelled.
        mistakes = {path: details for path, details in mistakes.items() if kinds[path] != "missing"}
    chosen = sorted(mistakes, key=lambda path: kinds[path] != "extra_forbidden")
    return all_of([_one(mistakes[path], path, model, place) for path in chosen])


def _one(
    details: list[ErrorDetails], path: KeyPath, model: type[BaseModel], place: Callable[[KeyPath], str]
) -> ToolkitError:
    first = details[0]
    message = first["msg"].removeprefix("Value error, ")
    context = first.get("ctx", {}) if first["type"] == "refused_value" else {}
    path = (*path, *context.get("path", ()))  # a check of a whole table names the key that it is about
    field = _field_at(model, path)
    if first["type"] == "extra_forbidden":
        problem, fix = _unknown(model, path)
    elif first["type"] == "missing":
        problem, fix = "missing key", f"add {path[-1]} = {form_of(field) if field else '...'}"
    elif context:
        problem, fix = message, context["fix"] or (f"use {form_of(field)}" if field else "change it")
    elif first["type"] in ("model_type", "dict_type"):
        problem, fix = f"expected a table, got {first['input']!r}", f"write [{'.'.join(path)}] and its keys below it"
    else:
        # A key of several types has one error for each; none of them alone describes the problem.
        several = len(details) > 1
        problem = f"{first['input']!r} is not a valid value for this key" if several else _problem(first, message)
        fix = f"use {form_of(field)}" if field else "see `toolkit config schema`"
    return ToolkitError(problem, where=f"{place(path)}:{dotted(path)}", fix=fix)


def _problem(details: ErrorDetails, message: str) -> str:
    value = details["input"]
    if details["type"] in ("value_error", "assertion_error"):
        if isinstance(value, dict) or message.startswith(("'", '"')) or ", got " in message:
            return message
        if message.startswith("expected "):
            return f"{message}, got {value!r}"
        return f"{value!r} {message}"
    return f"{value!r} is rejected: {message[:1].lower()}{message[1:]}"


def _known_path(model: type[BaseModel], location: KeyPath) -> KeyPath:
    """The location without pydantic's own additions (the member of a union, the index of a list)."""
    inner: Any = model
    for depth, part in enumerate(location):
        inner = _step(inner, part)
        if inner is None:
            return location[: depth + 1]
        if table_model(inner) is None and get_origin(inner) is not dict:
            return location[: depth + 1]
    return location


def _step(annotation: Any, part: str) -> Any:
    """Return the type of the key or member `part`; None if it does not exist."""
    if get_origin(annotation) in (dict, list):
        return get_args(annotation)[-1]
    field = field_named(annotation, part)
    return field.annotation if field else None


def _field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Return the field of the innermost key of `path` in one of the tables."""
    inner: Any = model
    details: FieldInfo | None = None
    for part in path:
        if table_model(inner) is inner:
            details = field_named(inner, part)
        inner = _step(inner, part)
        if inner is None:
            return details
    return details


def field_named(model: Any, name: str) -> FieldInfo | None:
    """Return the field with the key `name` in a file; None if `model` is not a table, as inside [args]."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return None
    for attribute, field in model.model_fields.items():
        if name == (field.alias or attribute):
            return field
    return None


def key_names(model: type[BaseModel]) -> list[str]:
    """Return the keys of `model` as a file contains them."""
    return [field.alias or attribute for attribute, field in model.model_fields.items()]


def table_model(annotation: Any) -> type[Table] | None:
    """Return the table type of a field, also of a table or a list of tables; None for any other field."""
    if get_origin(annotation) in (dict, list):
        annotation = get_args(annotation)[-1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def _unknown(model: type[BaseModel], path: KeyPath) -> tuple[str, str]:
    *tables, name = path
    owner: type[BaseModel] = model
    for table in tables:
        field = field_named(owner, table)
        owner = (table_model(field.annotation) if field else None) or owner
    names = key_names(owner)
    if name in _COMPONENTS:
        return f"{name!r} is not a valid key: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX
    problem = f"unknown key {name!r} in [{'.'.join(tables)}]" if tables else f"unknown key or table {name!r}"
    if close := nearest(name, names):
        return problem, f"write {close[0]!r}"
    for table in key_names(model):
        field = field_named(model, table)
        other = table_model(field.annotation) if field else None
        if other and name in key_names(other):
            return problem, f"move it to [{table}]"
    return problem, f"remove it, or use one of {', '.join(names)}"
