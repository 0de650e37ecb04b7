"""The base class for the tables of job and site files: typed, immutable models that reject unknown keys.

The field of a key defines its meaning, its form and its limits. The error messages, the JSON schemas and docs/keys.md
are generated from these fields.
"""

import difflib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from toolkit.config.document import LARGEST_INTEGER, KeyPath, no_line, no_word, parts

__all__ = ["form_of", "nearest"]

_LIMITS = {
    "multiple_of": "a multiple of", "ge": "at least", "gt": "more than", "le": "at most", "lt": "less than",
}  # fmt: skip


class Table(BaseModel):
    """A table that rejects unknown keys and does not convert types: "4" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    # Keys whose strings may contain newlines, because toolkit never writes them as a line of a batch script.
    free_text: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_travel(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, value in values.items():
                field = cls.model_fields.get(name)
                if field is None or not _is_table_or_free(field.annotation):
                    cls._check_value(name, value)
        return values

    @classmethod
    def _check_value(cls, name: str, value: Any) -> None:
        problem_of = no_word if name in cls.free_text else no_line
        for path, part, _ in parts(value, (name,)):
            if isinstance(part, str) and (problem := problem_of(part)):
                raise refuse_value(path, problem)
            if isinstance(part, int) and abs(part) > LARGEST_INTEGER:
                raise refuse_value(path, "does not fit into 64 bits")


def _is_table_or_free(annotation: Any) -> bool:
    """Return whether a field is a table, which checks its own keys, or [args], which has its own validator."""
    arguments = get_args(annotation)
    inner = arguments[1] if get_origin(annotation) is dict else annotation
    return inner is Any or (isinstance(inner, type) and issubclass(inner, BaseModel))


def refuse_value(path: KeyPath, message: str, fix: str = "") -> PydanticCustomError:
    """Return the error for a validator to raise; `path` is relative to the validated key, `fix` defaults to its form."""
    return PydanticCustomError("refused_value", "{message}", {"path": path, "message": message, "fix": fix})


def key(default: Any, meaning: str, *, form: str = "", derived: str = "", **limits: Any) -> Any:
    """Declare one key: its default, its meaning, and the values that it accepts.

    Args:
        form: a description of the accepted values, if the type alone does not describe them.
        derived: a description of the default, if it is derived from other keys.
        limits: arguments of pydantic's Field (`ge`, `le`, `pattern`, `alias`, `default_factory`, ...).
    """
    extra: JsonDict = {name: text for name, text in (("x-form", form), ("x-default", derived)) if text}
    if "default_factory" in limits:
        return Field(description=meaning, json_schema_extra=extra or None, **limits)
    return Field(default, description=meaning, json_schema_extra=extra or None, **limits)


def form_of(field: FieldInfo) -> str:
    """Return a description of the values that a key accepts, such as "a whole number, at least 1"."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "x-form" in extra:
        return str(extra["x-form"])
    limits = []
    for limit in field.metadata:
        for attribute, words in _LIMITS.items():
            bound = getattr(limit, attribute, None)
            if bound is not None:
                limits.append(f"{words} {bound}")
    return ", ".join([type_words(field.annotation), *limits])


def type_words(annotation: Any) -> str:
    """Return a description of a type for users of TOML, such as "a list of strings"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_words(item) for item in arguments if item is not NoneType)
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    if origin is dict:
        return f"a table of {_plural(arguments[1])}"
    names: dict[Any, str] = {
        bool: "true or false", int: "a whole number", float: "a number", str: "a string", Any: "any value",
    }  # fmt: skip
    if annotation not in names:
        return "a table"
    return names[annotation]


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return type_words(annotation).removeprefix("a ") + "s"


def nearest(word: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Return up to `count` names in `known` that are similar to `word`, the most similar first."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.6)
