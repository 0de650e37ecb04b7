"""Replace the generated part of a page in docs/, which is between two markers."""

from __future__ import annotations

import sys
from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the part between the two markers by `text`; the markers remain."""
    before, marker, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not marker or not closed:
        sys.exit(f"markers not found in {page}. Fix: add the lines {begin} and {end}")
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
