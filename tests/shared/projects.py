"""Folders of jobs as users have them."""

from __future__ import annotations

import subprocess
from pathlib import Path

SAYS = 'import helper, pathlib\nprint(helper.WORD, pathlib.Path(__file__).with_name("data.txt").read_text())\n'


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout
