"""Files of the running kernel below /sys: what one holds, what a folder has."""

from __future__ import annotations

from pathlib import Path

from toolkit.topology.names import by_numbers

SYSTEM_ROOT = Path("/sys")


def read_file(path: Path) -> str | None:
    """What it holds; None where it is not there, or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # many files of /sys cannot be read while a device is away
        return None


def names_in(folder: Path) -> list[str]:
    """What stands in it, mlx5_2 before mlx5_10; nothing where there is no such folder."""
    try:
        return sorted((path.name for path in folder.iterdir()), key=by_numbers)
    except OSError:
        return []
