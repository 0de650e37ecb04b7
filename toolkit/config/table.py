"""What every table of a job or site file is: closed, frozen, typed, each key with its meaning.

The meaning, the form and the limits of a key stand once, in its field. The error messages, the JSON schema and
the reference in docs/keys.md are all made from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from toolkit.config.lines import KeyPath
from toolkit.config.values import LARGEST_INTEGER, no_line, no_word, parts

_LIMITS = {
    "multiple_of": "a multiple of", "ge": "at least", "gt": "more than", "le": "at most", "lt": "less than",
}  # fmt: skip


class Table(BaseModel):
    """One closed table. TOML's types are strict: "4" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    # Keys whose value never becomes a line of a batch script, so it may contain newlines.
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
        judge = no_word if name in cls.free_text else no_line
        for path, part, _ in parts(value, (name,)):
            if isinstance(part, str) and (said := judge(part)):
                raise refuse_value(path, said)
            if isinstance(part, int) and abs(part) > LARGEST_INTEGER:
                raise refuse_value(path, "is larger than 64 bits hold")


def _is_table_or_free(annotation: Any) -> bool:
    """Tables check their own keys, and [args] has rules of its own."""
    arguments = get_args(annotation)
    inner = arguments[1] if get_origin(annotation) is dict else annotation
    return inner is Any or (isinstance(inner, type) and issubclass(inner, BaseModel))


def refuse_value(path: KeyPath, said: str, fix: str = "") -> PydanticCustomError:
    """The error of a validator about the key `path` below its own table; `fix` is the key's form if not given."""
    return PydanticCustomError("refused_value", "{said}", {"path": path, "said": said, "fix": fix})


def key(default: Any, meaning: str, *, form: str = "", derived: str = "", **limits: Any) -> Any:
    """Declare one key: its default, what it means, and how a value must look.

    Args:
        form: the value's form in words, where the type alone does not say it.
        derived: the default in words, where it is worked out from other keys.
        limits: pydantic's own (`ge`, `le`, `pattern`, `alias`, `default_factory`, ...).
    """
    extra: JsonDict = {name: text for name, text in (("x-form", form), ("x-default", derived)) if text}
    if "default_factory" in limits:
        return Field(description=meaning, json_schema_extra=extra or None, **limits)
    return Field(default, description=meaning, json_schema_extra=extra or None, **limits)


def form_of(field: FieldInfo) -> str:
    """Say in words which values a key takes: "a whole number, at least 1"."""
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
    """Name a type as a user of TOML would."""
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
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        Any: "any value",
    }
    if annotation not in names:
        return "a table"
    return names[annotation]


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return type_words(annotation).removeprefix("a ") + "s"


def nearest(word: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Return the `count` names of `known` that look most like `word`; empty when none does."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.6)
