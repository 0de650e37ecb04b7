"""Who imports the integrations, and how each one is installed."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "toolkit/integrations").glob("*.py") if path.stem != "__init__")


def importers(package: Path) -> set[tuple[str, bool]]:
    """The files that import an integration by a statement, and whether only their functions do."""
    found = set()
    for path in package.rglob("*.py"):
        if path.parent.name == "integrations":
            continue
        tree = ast.parse(path.read_text())
        top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{one.name}" for one in node.names] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("toolkit.integrations") for name in names):
                found.add((str(path.relative_to(package)), id(node) not in top))
    return found


def test_an_import_is_found_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from toolkit import integrations\n")
    (tmp_path / "b.py").write_text("def f():\n    from toolkit.integrations.lightning import x\n")
    (tmp_path / "c.py").write_text("NAME = 'toolkit.integrations.lightning'\nfrom toolkit import errors\n")
    assert importers(tmp_path) == {("a.py", False), ("b.py", True)}


def test_only_commands_import_an_integration_and_only_when_they_run() -> None:
    assert {(path, True) for path, _ in importers(ROOT / "toolkit")} == importers(ROOT / "toolkit")
    assert all(path.startswith("cli/") for path, _ in importers(ROOT / "toolkit"))


def test_each_is_short_and_has_an_extra_a_job_and_a_section_of_the_page() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    page = (ROOT / "docs/frameworks.md").read_text()
    jobs = "".join(path.read_text() for path in (ROOT / "jobs").glob("*.py"))
    assert MODULES == ["accelerate", "deepspeed", "lightning", "transformers"]
    for name in MODULES:
        assert len((ROOT / f"toolkit/integrations/{name}.py").read_text().splitlines()) < 150
        assert name in setup["options.extras_require"]
        assert f"from toolkit.integrations.{name} import" in page and f"from toolkit.integrations.{name} import" in jobs


def test_the_names_for_a_loop_load_neither_torch_nor_a_framework() -> None:
    program = (
        "import sys, toolkit; toolkit.should_stop(1); "
        f"assert not {{'torch', 'numpy', *{MODULES}}} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
