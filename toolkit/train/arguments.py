"""The free table `[args]` of a job, read into the job's own dataclass."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from toolkit.errors import ToolkitError

Arguments = TypeVar("Arguments")


def read_arguments(kind: type[Arguments], table: Mapping[str, Any]) -> Arguments:
    """Fill the dataclass `kind`, whose fields are int, float, bool or str with defaults, from `[args]`.

    Raises:
        ToolkitError: for a key that `kind` does not have, and for a value of another type.
    """
    types = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in names:
            nearest = difflib.get_close_matches(key, names, n=1)
            fix = f"write {nearest[0]!r}" if nearest else f"use one of {', '.join(names)}"
            raise ToolkitError(f"this job has no argument {key!r}", where=f"args.{key}", fix=fix)
        wanted = types[key]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise ToolkitError(
                f"{value!r} is not of type {wanted.__name__}",
                where=f"args.{key}",
                fix=f"write a value of type {wanted.__name__}",
            )
        values[key] = value
    return kind(**values)
