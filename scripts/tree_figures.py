"""Print a table of size figures of a checkout: files, lines, words, import cycles, names, time of `toolkit --help`.

python scripts/tree_figures.py [CHECKOUT]
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from import_cycles import import_cycles

HELP_CALLS = 10


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines at its top level, without imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (found.id for found in ast.walk(target) if isinstance(found, ast.Name))


def exported_names(tree: ast.Module) -> int:
    """Return the number of names in `__all__`; 0 unless it is a literal list or tuple."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in [ast.unparse(target) for target in node.targets]:
            return len(node.value.elts) if isinstance(node.value, ast.List | ast.Tuple) else 0
    return 0


def help_seconds(checkout: Path) -> list[float]:
    command, found = [checkout / ".venv" / "bin" / "toolkit", "--help"], []
    for _ in range(HELP_CALLS + 1):  # the first call compiles bytecode
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - began)
    return found[1:]


def figures(checkout: Path) -> Iterator[tuple[str, object]]:
    for name in ("toolkit", "tests"):
        files = list((checkout / name).rglob("*.py"))
        yield f"files {name}/**/*.py", len(files)
        yield f"lines {name}/**/*.py", sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    pages = [checkout / "README.md", *(checkout / "docs").glob("*.md")]
    yield "words docs/*.md + README.md", sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    cycles = import_cycles(checkout / "toolkit")
    yield "import cycles (files in them)", f"{len(cycles)} ({sum(map(len, cycles))})"
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (checkout / "toolkit").rglob("*.py")]
    public = [name for tree in trees for name in names_of(tree) if not name.startswith("_")]
    yield "public names at the top level of modules", len(public)
    yield "names in __all__", sum(map(exported_names, trees))
    seconds = help_seconds(checkout)
    yield f"toolkit --help, min / median of {HELP_CALLS}", f"{min(seconds):.3f} s / {statistics.median(seconds):.3f} s"


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    print("| figure | value |\n|---|---|")
    for name, value in figures(checkout):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
