"""Whether the file system of a run has room left."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FULL_BYTES = 1 << 20  # a file system with less room than this is full to a run


def why_full(path: Path) -> str:
    """How little is left where `path` lies; "" where that is enough. A quota of another user's kind is not seen here."""
    space = os.statvfs(path)
    left = space.f_bavail * space.f_frsize
    if left >= FULL_BYTES and space.f_favail != 0:
        return ""
    return f"{path}: {left} bytes and {space.f_favail} files are left"


_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """The file system that a path lies on."""

    point: Path
    kind: str
    device: str


def mount_of(path: Path) -> Mount | None:
    """The file system that holds a path, or would; None where /proc does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    held = path.resolve()
    found = None
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        point, kind_and_device = Path(_unescaped(fields.split()[4])), rest.split()
        if held.is_relative_to(point) and (found is None or point.is_relative_to(found.point)):
            found = Mount(point, kind_and_device[0], _unescaped(kind_and_device[1]))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
