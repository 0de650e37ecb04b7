"""Whether the file system of a run has room left."""

from __future__ import annotations

import os
from pathlib import Path

FULL_BYTES = 1 << 20  # a file system with less room than this is full to a run


def why_full(path: Path) -> str:
    """How little is left where `path` lies; "" where that is enough. A quota of another user's kind is not seen here."""
    space = os.statvfs(path)
    left = space.f_bavail * space.f_frsize
    if left >= FULL_BYTES and space.f_favail != 0:
        return ""
    return f"{path}: {left} bytes and {space.f_favail} files are left"
