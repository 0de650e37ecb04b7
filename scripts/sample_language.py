"""Draw messages, docstrings and comments of the package for a reader who judges their language.

    python scripts/sample_language.py SEED [TREE]

Prints 100 messages, 50 docstrings and 50 comments, each with its place; the same seed and tree give the same sample.
"""

from __future__ import annotations

import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

COUNTS = {"message": 100, "docstring": 50, "comment": 50}
# Calls whose string arguments users read, besides those of classes named ...Error and of ...say and ...warn functions.
PRINTING = {
    "echo",
    "note",
    "print",
    "report",
    "refuse",
    "advise",
    "Finding",
    "Option",
    "option",
    "argument",
    "key",
    "command",
}
MIN_CHARACTERS = 15


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in PRINTING or name.lower().endswith(("error", "say", "warn", "refused")):
                given = [*node.args, *(word.value for word in node.keywords)]
                strings = [
                    ast.unparse(one) for one in given if isinstance(one, ast.Constant | ast.JoinedStr | ast.BinOp)
                ]
                shown = "  |  ".join(text for text in strings if " " in text)
                if len(shown) >= MIN_CHARACTERS:
                    yield node.lineno, shown


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            name = getattr(node, "name", "module")
            yield getattr(node, "lineno", 1), f"{name}: {text}"


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Blocks of comment lines, each with the line of code that follows."""
    lines = source.splitlines()
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, text = token.start[0], token.string.lstrip("# ")
        is_inline = bool(lines[row - 1][: token.start[1]].strip())
        block.append(text)
        follows = row < len(lines) and lines[row].lstrip().startswith("#")
        if is_inline or not follows:
            joined = " ".join(block)
            if len(joined) >= MIN_CHARACTERS and not joined.startswith(("fmt:", "type:", "noqa")):
                code = lines[row - 1][: token.start[1]] if is_inline else (lines[row] if row < len(lines) else "")
                yield row, f"{joined}   [{code.strip()[:110]}]"
            block = []


def main() -> None:
    seed, tree = int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in COUNTS}
    for path in sorted((tree / "toolkit").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        parsed = ast.parse(source)
        for kind, rows in (
            ("message", messages(parsed)), ("docstring", docstrings(parsed)), ("comment", comments(source))
        ):  # fmt: skip
            found[kind] += [(f"{path.relative_to(tree)}:{line}", text) for line, text in rows]
    chance = random.Random(seed)
    for kind, count in COUNTS.items():
        for number, (place, text) in enumerate(chance.sample(found[kind], count), start=1):
            print(f"[{kind} {number}] {place}\n{text}\n")


if __name__ == "__main__":
    main()
