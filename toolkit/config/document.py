"""Read TOML files with the line number of each key, check single values, and describe the origin of a setting."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["Document", "Flag", "KeyPath", "Layer", "Origin", "leaves", "no_line", "read_document"]


@dataclass(frozen=True)
class Document:
    """The values of a TOML file and the line numbers of its keys."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, key: KeyPath) -> str:
        """Return file:line of `key`, or of the innermost table that contains it."""
        return f"{self.path}:{line_of(self.lines, key)}"


def read_document(path: Path) -> Document:
    """Read the TOML file `path`.

    Raises:
        NotFoundError: the file does not exist.
        ToolkitError: it cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows may write a byte order mark
    except FileNotFoundError as error:
        raise NotFoundError("file not found", where=str(path), fix="specify the path of a TOML file") from error
    except OSError as error:
        raise ToolkitError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="specify a readable file"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ToolkitError(
            f"byte {error.object[error.start]:#04x} is not UTF-8", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line, problem = _where_tomllib_stopped(str(error), text)
        raise ToolkitError(
            f"invalid TOML: {problem}", where=f"{path}:{line}", fix="fix that line; strings need quotes, see toml.io"
        ) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    except ValueError as error:  # raised for an integer with too many digits
        raise ToolkitError(f"invalid TOML: {error}", where=str(path), fix="write the number as a string") from error
    if any(depth > DEEPEST for _, _, depth in parts(values)):
        raise _too_deep(path)
    return Document(path, values, key_lines(text.replace("\r\n", "\n")))


def _too_deep(path: Path) -> ToolkitError:
    return ToolkitError(
        f"tables and lists are nested more than {DEEPEST} levels deep", where=str(path), fix="reduce the nesting"
    )


def leaves(values: dict[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value with its path; a table counts as a value only if it is empty."""
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def _where_tomllib_stopped(message: str, text: str) -> tuple[int, str]:
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL)
    if match is None:
        return 1, message
    line = int(match[2]) if match[2] else max(1, len(text.splitlines()))
    return line, match[1]


LARGEST_INTEGER = 2**63 - 1  # TOML requires parsers to support 64-bit signed integers, but no larger ones
DEEPEST = 100  # levels of tables and lists; JSON writers fail soon after 200
LONGEST_WORD_BYTES = 131_071  # execve(2): MAX_ARG_STRLEN is 32 pages, including the final NUL
MOST_BYTES = 1_000_000  # half of the usual ARG_MAX; the other half is left for the variables of the site

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def no_text(text: str) -> str:
    """Return why a string cannot be written to a file as UTF-8; "" if it can."""
    if match := _SURROGATE.search(text):
        return f"contains a byte that is not UTF-8 ({match.group()!a})"
    return ""


def no_line(text: str) -> str:
    """Return why a string cannot be part of a script line, such as a newline, which would start a command; "" if it can."""
    if match := _CONTROL.search(text):
        return f"contains the control character {match.group()!r}"
    return no_text(text)


def no_word(text: str) -> str:
    """Return why a string cannot be a command-line argument or the value of an environment variable; "" if it can."""
    return "contains a NUL, which ends a string in system calls" if "\0" in text else no_text(text)


def no_json(value: object) -> str:
    """Return why a scalar cannot be stored in JSON unchanged; "" if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON does not support"
    return no_text(value) if isinstance(value, str) else ""


def parts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, int]]:
    """Yield every key and every scalar inside `value`, with its path and depth; paths omit list indexes."""
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
    """Return why the system cannot start a program with these arguments and variables; "" if it can."""
    pairs = [f"{name}={value}" for name, value in variables.items()]
    sizes = {part: len(part.encode("utf-8", "surrogateescape")) for part in (*arguments, *pairs)}
    for part, size in sizes.items():
        if size > LONGEST_WORD_BYTES:
            return f"{part[:40]!r}... has {size} bytes, but the system accepts at most {LONGEST_WORD_BYTES} per string"
    if sum(sizes.values()) > MOST_BYTES:
        return f"arguments and variables have {sum(sizes.values())} bytes together, more than {MOST_BYTES}"
    return ""


KeyPath = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)\s*""")
# One token of a value: a string, a bracket, a comment, a line end, or any other character.
_VALUE_STEP = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|[\[{]|[\]}]|#[^\n]*|\n|.', re.DOTALL
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line number, from 1, of every table header and key in `text`, which must be valid TOML.

    Keys of an inline table have the line of that table. In an array of tables, paths contain the index of the table,
    from 0, and the array itself has the line of its first table.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}  # the index of the current table of each array of tables
    position = _skip(text, 0)
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        if text[position] == "[":
            opening = 2 if text.startswith("[[", position) else 1
            table, position = _key_path(text, position + opening)
            table = _numbered(table, counts, begins=opening == 2)
            path, position = table, position + opening
        else:
            key, position = _key_path(text, position)
            path, position = table + key, _value_end(text, position + 1)
        for depth in range(1, len(path) + 1):
            lines.setdefault(path[:depth], line)
        position = _skip(text, position)
    return lines


def _numbered(header: KeyPath, counts: dict[KeyPath, int], *, begins: bool) -> KeyPath:
    """Return the path of a table header with the indexes of array elements; `begins` is True for a `[[...]]` header."""
    path: KeyPath = ()
    for depth, part in enumerate(header, start=1):
        path = (*path, part)
        if begins and depth == len(header):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path


def dotted(path: KeyPath) -> str:
    """Return a key as error messages show it, such as `train.steps` or `component[1].nodes`."""
    if path[0] == "component" and len(path) > 1:
        return ".".join([f"component[{path[1]}]", *path[2:]])
    return ".".join(path)


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int:
    """Return the line of `path`, or of the innermost table that contains it; 1 if neither is known."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None  # The pattern matches the empty string.
    return match.end()


def _key_path(text: str, position: int) -> tuple[KeyPath, int]:
    parts: list[str] = []
    while match := _KEY_PART.match(text, position):
        part = match[1]
        parts.append(next(iter(tomllib.loads(f"{part} = 0"))) if part[0] in "\"'" else part)
        position = match.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    assert parts, "expected valid TOML"
    return tuple(parts), position


def _value_end(text: str, position: int) -> int:
    depth = 0
    while match := _VALUE_STEP.match(text, position):
        position = match.end()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if match[0] == "\n" and depth == 0:
            break
    return position


# From lowest to highest precedence. Derived values are computed from others after all layers are read.
Layer = Literal["built-in", "site", "environment", "user", "job", "SBATCH_*", "TOOLKIT_*", "flag", "derived"]


@dataclass(frozen=True)
class Origin:
    """Where a value was set. `detail` is file:line, a variable, a flag as typed, or the keys that it was derived from."""

    layer: Layer
    detail: str = ""

    def place(self, key: str) -> str:
        """Return the place that an error about `key` reports."""
        return f"{self.detail}:{key}" if self.detail else key


@dataclass(frozen=True)
class OriginInComponent(Origin):
    """The origin of a value that a component sets instead of [job]; errors name the key of the component."""

    number: int = 0

    def place(self, key: str) -> str:
        return super().place(key.replace("job.", f"component[{self.number}].", 1))


@dataclass(frozen=True)
class Flag:
    """A value from the command line and the name of its flag, such as "-N"; a string is parsed by the type of the key."""

    value: Any
    name: str
