"""Read files and folders of the running kernel below /sys."""

from __future__ import annotations

from pathlib import Path

from toolkit.topology.names import by_numbers

__all__ = ["SYSTEM_ROOT", "names_in", "read_file"]

SYSTEM_ROOT = Path("/sys")


def read_file(path: Path) -> str | None:
    """The stripped content of a file; None if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # many files of /sys cannot be read while a device is offline
        return None


def names_in(folder: Path) -> list[str]:
    """The names in a folder, mlx5_2 before mlx5_10; empty if there is no such folder."""
    try:
        return sorted((path.name for path in folder.iterdir()), key=by_numbers)
    except OSError:
        return []
