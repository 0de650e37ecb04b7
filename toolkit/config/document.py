"""A TOML file as values, with the line of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.lines import KeyPath, key_lines, line_of
from toolkit.config.values import DEEPEST, parts
from toolkit.errors import NotFoundError, ToolkitError


@dataclass(frozen=True)
class Document:
    """The file's values and the lines of its keys."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, key: KeyPath) -> str:
        """Return file:line of `key`, or of the innermost table around it."""
        return f"{self.path}:{line_of(self.lines, key)}"


def read_document(path: Path) -> Document:
    """Read the TOML file `path`.

    Raises:
        NotFoundError: the file does not exist.
        ToolkitError: it cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows write a byte order mark
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
    except ValueError as error:  # a number that Python cannot read
        raise ToolkitError(f"invalid TOML: {error}", where=str(path), fix="write that number as a string") from error
    if any(depth > DEEPEST for _, _, depth in parts(values)):
        raise _too_deep(path)
    return Document(path, values, key_lines(text.replace("\r\n", "\n")))


def _too_deep(path: Path) -> ToolkitError:
    return ToolkitError(
        f"tables and lists are nested more than {DEEPEST} levels deep", where=str(path), fix="reduce the nesting"
    )


def leaves(values: dict[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that is not a filled table, with its path."""
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
