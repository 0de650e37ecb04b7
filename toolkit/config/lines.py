"""The line of each key of a TOML file. tomllib does not provide it, and every error message needs it."""

from __future__ import annotations

import re
import tomllib

KeyPath = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)\s*""")
# One step through a value: a string, a bracket, a comment, a line's end, or any other character.
_VALUE_STEP = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|[\[{]|[\]}]|#[^\n]*|\n|.', re.DOTALL
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, of every table header and key in `text`, which tomllib has accepted.

    Keys inside an inline table have their table's line. Each table of an array has its number, counted from 0, in the
    paths of its keys; for the array itself the first line counts.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}  # the number of tables of each array
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
    """A header's path with the number of each array's table that contains it, or that it starts."""
    path: KeyPath = ()
    for depth, part in enumerate(header, start=1):
        path = (*path, part)
        if begins and depth == len(header):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path


def dotted(path: KeyPath) -> str:
    """A key as error messages print it: `train.steps`, `component[1].nodes`."""
    if path[0] == "component" and len(path) > 1:
        return ".".join([f"component[{path[1]}]", *path[2:]])
    return ".".join(path)


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int:
    """Return the line of `path`, or of the innermost table around it; 1 if none is known."""
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
    assert parts, "the text was accepted by tomllib"
    return tuple(parts), position


def _value_end(text: str, position: int) -> int:
    depth = 0
    while match := _VALUE_STEP.match(text, position):
        position = match.end()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if match[0] == "\n" and depth == 0:
            break
    return position
