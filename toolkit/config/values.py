"""Checks that a value reaches its reader unchanged: through JSON, a batch script, an environment and arguments.

Values that would not are rejected when they are read; none is replaced, truncated or dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.config.lines import KeyPath

LARGEST_INTEGER = 2**63 - 1  # TOML's limit that every reader must support
DEEPEST = 100  # levels of tables and lists; JSON writers fail soon after 200
LONGEST_WORD_BYTES = 131_071  # execve(2): MAX_ARG_STRLEN is 32 pages, including the final NUL
MOST_BYTES = 1_000_000  # half of the usual limit of all arguments and variables; the rest is the site's

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def no_text(text: str) -> str:
    """Why a string cannot be written to a file; "" if it can."""
    if match := _SURROGATE.search(text):
        return f"contains a byte that is not UTF-8 ({match.group()!a})"
    return ""


def no_line(text: str) -> str:
    """Why a string cannot be part of one line of a script: a newline in a #SBATCH line would start a command."""
    if match := _CONTROL.search(text):
        return f"contains the control character {match.group()!r}"
    return no_text(text)


def no_word(text: str) -> str:
    """Why a string can be neither an argument nor a variable's value; "" if it can."""
    return "contains a NUL, which ends a string in system calls" if "\0" in text else no_text(text)


def no_json(value: object) -> str:
    """Why a single value would change in JSON; "" if it would not."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON does not support"
    return no_text(value) if isinstance(value, str) else ""


def parts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, int]]:
    """Yield every key and every single value inside `value`, with its path and depth; lists do not count in paths."""
    below: list[tuple[KeyPath, Any, int]] = [(path, value, 0)]
    while below:
        path, value, depth = below.pop()
        if depth > DEEPEST:
            yield path, value, depth  # deeper levels are not checked
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield (*path, name), name, depth
                below.append(((*path, name), inner, depth + 1))
        elif isinstance(value, list):
            below += [(path, inner, depth + 1) for inner in value]
        else:
            yield path, value, depth


def no_start(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Why the system would not start a program with these arguments and variables; "" if it would."""
    pairs = [f"{name}={value}" for name, value in variables.items()]
    sizes = {part: len(part.encode("utf-8", "surrogateescape")) for part in (*arguments, *pairs)}
    for part, size in sizes.items():
        if size > LONGEST_WORD_BYTES:
            return f"{part[:40]!r}... has {size} bytes, but the system accepts at most {LONGEST_WORD_BYTES} per string"
    if sum(sizes.values()) > MOST_BYTES:
        return f"arguments and variables have {sum(sizes.values())} bytes together, more than {MOST_BYTES}"
    return ""
