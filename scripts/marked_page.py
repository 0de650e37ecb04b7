"""Write the generated part of a page of docs/, between two markers."""

from __future__ import annotations

import sys
from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the part between the two markers, which remain, by `text`."""
    before, marker, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not marker or not closed:
        sys.exit(f"markers of the table not found in {page}. Fix: add the lines {begin} and {end}")
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
