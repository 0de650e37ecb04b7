"""What `make test` runs: all of the tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_folders_of_make_cluster_hold_every_test_of_the_cluster() -> None:
    (folders,) = re.findall(r'-m "cluster and not evidence" (.*)$', (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "cluster" in path.read_text()]
    elsewhere = {path.relative_to(ROOT).parent for path in marked} - {Path(name) for name in folders.split()}
    assert marked and not elsewhere, "they would run neither with `make unit` nor with `make cluster`"
