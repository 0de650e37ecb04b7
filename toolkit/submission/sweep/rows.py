"""Build the rows of a sweep: for each task, the values that override the job's, and where the user set each one."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.argv import SWEPT_ARGUMENT
from toolkit.config.document import Flag
from toolkit.config.texts import TABLES, read_text
from toolkit.errors import ToolkitError

__all__ = ["Row", "check_key", "check_keys", "overlap", "product", "read_value", "refuse_twice", "rows_of_option"]

MOST_TASKS = 100_000  # more than any queue accepts; each task is resolved and recorded at submission

Row = Mapping[str, Flag]


def product(factors: Sequence[Sequence[Row]], *, where: str) -> list[Row]:
    """Return every combination, the last factor changing fastest.

    Raises:
        ToolkitError: there are too many.
    """
    if (tasks := math.prod(map(len, factors))) > MOST_TASKS:
        sizes = " x ".join(str(len(factor)) for factor in factors)
        raise ToolkitError(
            f"{sizes} values make {tasks} tasks, but a sweep may have at most {MOST_TASKS}",
            where=where, fix="sweep fewer values at once",
        )  # fmt: skip
    return [{key: flag for row in rows for key, flag in row.items()} for rows in itertools.product(*factors)]


def rows_of_option(option: str) -> list[Row]:
    """Return the rows of one `--sweep KEY=V1,V2`, one per value.

    Raises:
        ToolkitError: the key is unknown, or a value has the wrong type.
    """
    key, equals, text = option.partition("=")
    key = key.strip()
    where = f"--sweep {option}"
    if not equals or not all(key.split(".")) or "." not in key:
        raise ToolkitError("expected TABLE.KEY=V1,V2", where=where, fix="write --sweep train.lr=1e-3,3e-4")
    check_key(key, where=where)
    words = split_values(text)
    if not all(words):
        raise ToolkitError("contains an empty value", where=where, fix='remove the extra comma; an empty string is ""')
    values = [read_value(key, word, where=where) for word in words]
    refuse_twice(values, where=where)
    return [{key: Flag(value, f"--sweep {key}={word}")} for value, word in zip(values, words, strict=True)]


def overlap(key: str, other: str) -> bool:
    """Return whether one of two keys would overwrite the other's value: `args.a` and `args.a.b`."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def check_keys(keys: Sequence[str], *, where: str) -> None:
    """Refuse keys of one task that would override each other silently.

    Raises:
        ToolkitError: a key occurs twice, or contains another one.
    """
    for number, key in enumerate(keys):
        for other in keys[:number]:
            if overlap(key, other):
                raise ToolkitError(
                    f"has two values for {key}" if key == other else f"sets both {key} and {other}, but one contains the other",
                    where=where, fix="omit one",
                )  # fmt: skip


def refuse_twice(values: Sequence[Any], *, where: str) -> None:
    """Refuse a value that would make two tasks the same.

    Raises:
        ToolkitError: the list contains a value twice.
    """
    seen: set[str] = set()
    for value in values:
        if (form := repr(value)) in seen:  # repr distinguishes 1, 1.0 and true
            raise ToolkitError(
                f"{form} occurs twice, so two tasks would be the same", where=where, fix="list each value once"
            )
        seen.add(form)


def split_values(text: str) -> list[str]:
    """Split at the commas outside quotes, brackets and braces: `[1,2],[3]` are two values."""
    words, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and depth <= 0 and not quote:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words]


def read_value(key: str, text: str, *, where: str) -> Any:
    """Parse a value by the type of its key, as `--set` does; an argument is used unchanged."""
    if key.startswith(SWEPT_ARGUMENT):
        return text
    return read_text(tuple(key.split(".")), text, where=where)


def check_key(key: str, *, where: str) -> None:
    """Refuse keys that must be the same for all tasks of an array.

    Raises:
        ToolkitError: the key is part of the script, which all tasks share, or the table is unknown.
    """
    table = key.partition(".")[0]
    if key.startswith(SWEPT_ARGUMENT):
        return
    if table == "job" or key == "restart.warn_s":
        raise ToolkitError(
            f"{key} is the same for all tasks of an array: Slurm reads it once, from the script",
            where=where,
            fix=f"submit a run for each value, with --set {key}=VALUE",
        )
    if table not in TABLES:
        read_text(tuple(key.split(".")), "", where=where)  # raises an error that suggests a similar key
