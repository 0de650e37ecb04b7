"""What packages import from each other, and how much of it is documented as the public Python API."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTED_NAMES_LIMIT = 250


class Imported(NamedTuple):
    """`name` of the module `source`, imported as `alias` by the module `importer`."""

    importer: str
    source: str
    name: str
    alias: str | None


def module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_below(package: Path) -> dict[str, ast.Module]:
    return {module_name(path, package.parent): ast.parse(path.read_text()) for path in package.rglob("*.py")}


def imports_between_modules(modules: dict[str, ast.Module]) -> Iterator[Imported]:
    """Every `from MODULE import NAME` of these modules, also inside functions; imports of whole modules are none."""
    for importer, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                for one in node.names:
                    if f"{node.module}.{one.name}" not in modules:
                        yield Imported(importer, node.module, one.name, one.asname)


def exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def package_of(module: str, packages: set[str]) -> str:
    """The package directly below toolkit; the modules directly below it count as one."""
    name = ".".join(module.split(".")[:2])
    return name if name in packages else "toolkit"


def not_exported(modules: dict[str, ast.Module]) -> list[Imported]:
    packages = {".".join(name.split(".")[:2]) for name in modules if name.count(".") > 1}
    names = {module: exported(tree) for module, tree in modules.items()}
    return [
        one for one in imports_between_modules(modules)
        if package_of(one.importer, packages) != package_of(one.source, packages) and one.name not in names[one.source]
    ]  # fmt: skip


def test_an_import_of_another_package_outside_all_is_found(tmp_path: Path) -> None:
    files = {
        "a/one.py": '__all__ = ["shown"]\nshown = hidden = 1', "a/two.py": "from toolkit.a.one import hidden",
        "b/three.py": "def f():\n    from toolkit.a.one import hidden, shown",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / "toolkit" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toolkit" / name).write_text(content)
    found = not_exported(modules_below(tmp_path / "toolkit"))
    assert found == [Imported("toolkit.b.three", "toolkit.a.one", "hidden", None)]


def test_packages_import_only_exported_names() -> None:
    assert not_exported(modules_below(ROOT / "toolkit")) == []


def test_no_name_is_private_to_a_module_and_imported_or_hidden_by_an_underscore() -> None:
    between = list(imports_between_modules(modules_below(ROOT / "toolkit")))
    assert len(between) > 1000
    private = [one for one in between if one.name.startswith("_") and not one.name.startswith("__")]
    renamed = [one for one in between if one.alias is not None and one.alias.startswith("_")]
    assert private == [] and renamed == []


def test_the_documented_api_is_small_and_explained() -> None:
    reference = (ROOT / "docs" / "reference" / "api.rst").read_text()
    documented = re.findall(r"automodule:: (\S+)", reference)
    names = [(module, name) for module in documented for name in importlib.import_module(module).__all__]
    assert len(documented) > 10 and len(names) <= DOCUMENTED_NAMES_LIMIT
    undocumented = []
    for module, name in names:
        value = getattr(importlib.import_module(module), name)
        if callable(value) and not value.__doc__:
            undocumented.append(f"{module}.{name}")
    assert undocumented == []
