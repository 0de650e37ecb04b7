"""The documentation site builds without a warning: pages, links and anchors, generated commands and API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    argv = ["-q", "-W", "--keep-going", "-d", tmp_path / "doctrees", "-b", "html", ROOT / "docs", tmp_path]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *argv], capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    commands = (tmp_path / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "toolkit submit" in commands and "--ntasks-per-node" in commands
    assert "Checkpointer" in (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
