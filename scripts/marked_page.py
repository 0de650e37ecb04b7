"""A page of docs/ of which a script writes what stands between two marks."""

from __future__ import annotations

import sys
from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the part of a page between the two marks by `text`; the marks stay."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page} has no place for the table. Fix: write the lines {begin} and {end}")
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
