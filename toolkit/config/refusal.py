"""Convert validation errors of pydantic to ToolkitErrors with the problem, file:line:key, and the fix."""

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

ARGUMENTS_FIX = "pass arguments of a script after `--`, or use job.argv or --sweep argv.NAME=V1,V2"
_COMPONENTS = ("component", "components", "hetjob")  # names that sbatch users may try for a heterogeneous job


def refuse(resolved: ResolvedJob, key: str, message: str, fix: str) -> ToolkitError:
    """Return an error about the value of a key, with the line or flag that set it."""
    return ToolkitError(message, where=resolved.origin(key).place(key), fix=fix)


def refusal(error: ValidationError, model: type[BaseModel], place: Callable[[KeyPath], str]) -> ToolkitError:
    """Return the errors in `error` about `model` as one ToolkitError, a line each; `place` returns where a key is set."""
    mistakes: dict[KeyPath, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        path = _known_path(model, tuple(str(part) for part in one["loc"]))
        mistakes.setdefault(path, []).append(one)
    kinds = {path: details[0]["type"] for path, details in mistakes.items()}
    if "extra_forbidden" in kinds.values():
        # Report only unknown keys: a missing key is usually one that the user misspelled.
        mistakes = {path: details for path, details in mistakes.items() if kinds[path] != "missing"}
    chosen = sorted(mistakes, key=lambda path: kinds[path] != "extra_forbidden")
    return all_of([_one(mistakes[path], path, model, place) for path in chosen])


def _one(
    details: list[ErrorDetails], path: KeyPath, model: type[BaseModel], place: Callable[[KeyPath], str]
) -> ToolkitError:
    first = details[0]
    message = first["msg"].removeprefix("Value error, ")
    context = first.get("ctx", {}) if first["type"] == "refused_value" else {}
    path = (*path, *context.get("path", ()))  # validators of whole tables pass the key in the context
    field = _field_at(model, path)
    if first["type"] == "extra_forbidden":
        problem, fix = _unknown(model, path)
    elif first["type"] == "missing":
        problem, fix = "required key not found", f"add {path[-1]} = {form_of(field) if field else '...'}"
    elif context:
        problem, fix = message, context["fix"] or (f"use {form_of(field)}" if field else "change it")
    elif first["type"] in ("model_type", "dict_type"):
        problem, fix = f"expected a table, got {first['input']!r}", f"write [{'.'.join(path)}] and its keys below it"
    else:
        # For a key that accepts several types, pydantic reports one error per type; no single one describes the problem.
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
    """Return the key path in a pydantic location, without the union members and list indexes that pydantic appends."""
    inner: Any = model
    for depth, part in enumerate(location):
        inner = _step(inner, part)
        if inner is None:
            return location[: depth + 1]
        if table_model(inner) is None and get_origin(inner) is not dict:
            return location[: depth + 1]
    return location


def _step(annotation: Any, part: str) -> Any:
    """Return the type of the key or list member `part` of `annotation`; None if it does not exist."""
    if get_origin(annotation) in (dict, list):
        return get_args(annotation)[-1]
    field = field_named(annotation, part)
    return field.annotation if field else None


def _field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Return the field of the last part of `path` that is a key of a table; None if no part is."""
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
    """Return the field of the key `name`; None if `model` has none or is not a table, as inside [args]."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return None
    for attribute, field in model.model_fields.items():
        if name == (field.alias or attribute):
            return field
    return None


def key_names(model: type[BaseModel]) -> list[str]:
    """Return the names of the keys of `model`, as written in a file."""
    return [field.alias or attribute for attribute, field in model.model_fields.items()]


def table_model(annotation: Any) -> type[Table] | None:
    """Return the table class of a field that is a table, or a dict or list of tables; None for any other field."""
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
    if path[0] == "argv":
        return f"unknown table {path[0]!r}", ARGUMENTS_FIX
    if name in _COMPONENTS:
        return f"{name!r} is not a valid key: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX
    problem = f"unknown key {name!r} in [{'.'.join(tables)}]" if tables else f"unknown key or table {name!r}"
    if close := nearest(name, names):
        return problem, f"write {close[0]!r}"
    for table in key_names(model):
        field = field_named(model, table)
        other = table_model(field.annotation) if field else None
        if other and name in key_names(other):
            return problem, f"move {name} to [{table}]"
    return problem, f"remove {name}, or use one of {', '.join(names)}"
