"""Find the arguments that a job script declares by parsing its source; nothing is imported or run."""

import ast
import dataclasses
from collections.abc import Mapping
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from toolkit.train.arguments import DividedBy

__all__ = ["declared_arguments"]

_KNOWN: Mapping[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "Any": Any, "Annotated": Annotated,
    "Literal": Literal,
}  # fmt: skip
_CALLED: Mapping[str, Any] = {"Field": Field, "DividedBy": DividedBy}


class _UnknownError(Exception):
    """Raised for an expression that cannot be evaluated without running the script."""


def declared_arguments(script: Path) -> type | None:
    """Return the dataclass that a script passes to `read_arguments(NAME, ...)`, or None if none is found.

    The field types and defaults must consist of known types, limits and literals. Any other field accepts every value
    here, and only the ranks check it.
    """
    try:
        return _declared(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # for example, the script has syntax of a newer Python
        return None


@lru_cache(maxsize=16)
def _declared(text: str) -> type | None:
    module = ast.parse(text)
    names = {_name_read(node) for node in ast.walk(module)} - {""}
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in names and not node.bases]
    if len(names) != 1 or len(classes) != 1:
        return None
    aliases = {
        one.targets[0].id: one.value
        for one in module.body
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name)
    }
    fields = [
        (one.target.id, _read_or(Any, one.annotation, aliases), _read_or(None, one.value, aliases))
        for one in classes[0].body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    return dataclasses.make_dataclass(
        classes[0].name,
        [(name, kind, dataclasses.field(default_factory=partial(copy, value))) for name, kind, value in fields],
    )


def _name_read(node: ast.AST) -> str:
    """Return NAME of a call `read_arguments(NAME, ...)`, else ""."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "read_arguments":
        return ""
    return node.args[0].id if node.args and isinstance(node.args[0], ast.Name) else ""


def _read_or(otherwise: Any, node: ast.expr | None, aliases: Mapping[str, ast.expr]) -> Any:
    try:
        return _read(node, aliases)
    except (_UnknownError, TypeError, ValueError):
        return otherwise


def _read(node: ast.expr | None, aliases: Mapping[str, ast.expr]) -> Any:
    """Evaluate an expression that consists of types, limits and literals."""
    match node:
        case ast.Name(id=name) if name in _KNOWN:
            return _KNOWN[name]
        case ast.Name(id=name) if name in aliases:
            return _read(aliases[name], {other: value for other, value in aliases.items() if other != name})
        case ast.Subscript(value=of, slice=ast.Tuple(elts=parts)):
            return _read(of, aliases)[tuple(_read(part, aliases) for part in parts)]
        case ast.Subscript(value=of, slice=part):
            return _read(of, aliases)[_read(part, aliases)]
        case ast.Call(func=ast.Name(id=name), args=given, keywords=named) if name in _CALLED:
            words = {word.arg: _read(word.value, aliases) for word in named if word.arg}
            return _CALLED[name](*(_read(one, aliases) for one in given), **words)
        case ast.expr():
            return ast.literal_eval(node)
    raise _UnknownError
