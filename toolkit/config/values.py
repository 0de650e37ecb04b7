"""Does a value arrive as it was written? Through JSON, a batch script, an environment and a program's arguments.

What cannot is rejected where it is read; nothing is replaced, cut or omitted on the way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.config.lines import KeyPath

LARGEST_INTEGER = 2**63 - 1  # TOML's own limit for what every reader must take
DEEPEST = 100  # tables and lists inside each other; JSON writers give up soon after 200
LONGEST_WORD_BYTES = 131_071  # execve(2): MAX_ARG_STRLEN is 32 pages, the closing NUL included
MOST_BYTES = 1_000_000  # half of the usual limit of all arguments and variables; the rest is the site's

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def no_text(text: str) -> str:
    """Why a file cannot contain `text`; "" if it can."""
    if found := _SURROGATE.search(text):
        return f"holds a byte that is not UTF-8 ({found.group()!a})"
    return ""


def no_line(text: str) -> str:
    """Why `text` cannot be part of one line of a script: a newline in a #SBATCH line would start a command."""
    if found := _CONTROL.search(text):
        return f"holds the control character {found.group()!r}"
    return no_text(text)


def no_word(text: str) -> str:
    """Why `text` can be neither an argument nor a variable's value."""
    return "contains a NUL, which terminates a string for the system" if "\0" in text else no_text(text)


def no_json(value: object) -> str:
    """Why one value that is neither list nor table would not come back from JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON does not have"
    return no_text(value) if isinstance(value, str) else ""


def parts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, int]]:
    """Yield every key and every single value inside `value`, with its path and depth; lists do not count in paths."""
    below: list[tuple[KeyPath, Any, int]] = [(path, value, 0)]
    while below:
        path, value, depth = below.pop()
        if depth > DEEPEST:
            yield path, value, depth  # what lies deeper is not looked at
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield (*path, name), name, depth
                below.append(((*path, name), inner, depth + 1))
        elif isinstance(value, list):
            below += [(path, inner, depth + 1) for inner in value]
        else:
            yield path, value, depth


def no_start(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Why the system would not start a program with these arguments and variables; "" where it would."""
    pairs = [f"{name}={value}" for name, value in variables.items()]
    sizes = {word: len(word.encode("utf-8", "surrogateescape")) for word in (*words, *pairs)}
    for word, size in sizes.items():
        if size > LONGEST_WORD_BYTES:
            return f"{word[:40]!r}... has {size} bytes, and the system takes at most {LONGEST_WORD_BYTES} of one text"
    if sum(sizes.values()) > MOST_BYTES:
        return f"arguments and variables have {sum(sizes.values())} bytes together, more than {MOST_BYTES}"
    return ""
