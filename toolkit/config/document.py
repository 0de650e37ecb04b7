"""A TOML file as values and the lines they stand on."""

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
    """The file's values and where each key stands."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, key: KeyPath) -> str:
        """Return file:line of `key`, or of the nearest table around it."""
        return f"{self.path}:{line_of(self.lines, key)}"


def read_document(path: Path) -> Document:
    """Read the TOML file `path`.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: it cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Windows' editors write a mark first
    except FileNotFoundError as error:
        raise NotFoundError("no such file", where=str(path), fix="give the path of a TOML file") from error
    except OSError as error:
        raise ToolkitError(f"cannot be read: {error.strerror}", where=str(path), fix="give a readable file") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ToolkitError(
            f"byte {error.object[error.start]:#04x} is not UTF-8", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line, said = _where_tomllib_stopped(str(error), text)
        raise ToolkitError(
            f"not TOML: {said}", where=f"{path}:{line}", fix="correct that line; texts need quotes, see toml.io"
        ) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    except ValueError as error:  # a number that Python does not read
        raise ToolkitError(f"not TOML: {error}", where=str(path), fix="write that number as a string") from error
    if any(depth > DEEPEST for _, _, depth in parts(values)):
        raise _too_deep(path)
    return Document(path, values, key_lines(text.replace("\r\n", "\n")))


def _too_deep(path: Path) -> ToolkitError:
    return ToolkitError(
        f"has more than {DEEPEST} tables and lists inside each other", where=str(path), fix="write it flatter"
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
