"""Print the import cycles between the files of a package, including imports inside functions.

    python scripts/import_cycles.py [toolkit]

A cycle is a strongly connected component of two or more files. Imports under `if TYPE_CHECKING:` do not count. An
import from a package counts for its `__init__` only if the imported name is not a submodule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def import_cycles(package: Path) -> list[list[str]]:
    """Return the import cycles of a package, each as a sorted list of module names."""
    files = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    graph = {name: imported_modules(name, file, files) - {name} for name, file in files.items()}
    return sorted(sorted(component) for component in components(graph) if len(component) > 1)


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(name: str, file: Path, files: Mapping[str, Path]) -> set[str]:
    """Return the modules in `files` that a file imports, at its top level or inside functions."""
    found = set()
    for node in running_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(node, name, is_package=file.name == "__init__.py")
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in files else base)
    return found & files.keys()


def absolute_name(node: ast.ImportFrom, importer: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those under `if TYPE_CHECKING:`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from running_nodes(other)
        else:
            yield from running_nodes(child)


def components(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yield the strongly connected components: sets of nodes that reach each other."""
    reached = {node: reachable(graph, node) for node in graph}
    done: set[str] = set()
    for node in graph:
        if node not in done:
            component = {node} | {other for other in reached[node] if node in reached[other]}
            done |= component
            yield component


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "toolkit")
    cycles = import_cycles(package)
    for cycle in cycles:
        print(" ".join(cycle))
    print(f"{len(cycles)} import cycles with {sum(map(len, cycles))} files")
    sys.exit(bool(cycles))


if __name__ == "__main__":
    main()
