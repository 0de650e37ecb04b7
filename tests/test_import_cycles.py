"""Import cycles between the files of a package, with the imports that run inside functions."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
import_cycles = runpy.run_path(str(ROOT / "scripts" / "import_cycles.py"))["import_cycles"]


def write_package(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / "sample" / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "sample"


def test_lazy_and_relative_imports_close_a_cycle(tmp_path: Path) -> None:
    package = write_package(
        tmp_path, a="def f():\n    import sample.b", b="from .inner import c", inner__in__c="from ..a import f",
        inner__in____init__="", d="import sample.a",
    )  # fmt: skip
    assert import_cycles(package) == [["sample.a", "sample.b", "sample.inner.c"]]


def test_imports_of_a_type_checker_close_none(tmp_path: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sample.b\nelse:\n    import sample.c"
    package = write_package(tmp_path, a=guarded, b="import sample.a", c="")
    assert import_cycles(package) == []
    (package / "c.py").write_text("import sample.a")
    assert import_cycles(package) == [["sample.a", "sample.c"]]


def test_toolkit_has_no_import_cycle() -> None:
    assert import_cycles(ROOT / "toolkit") == []
