"""Remove shared memory that killed ranks leave on a node: rings of steps, and segments of MPICH.

It occupies 2 MiB or more until the node reboots. A ring has a lock while its rank is running.

MPICH unlinks its segment only in MPI_Finalize. Its name does not contain the job, so a segment is removed only if it
belongs to the user, is newer than the launch of the ranks, and is not mapped by any process: no job can be using it.
"""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.metrics.ring import unused_rings

__all__ = ["remove_left_behind"]

FOLDER = Path("/dev/shm")
_PATTERN = "mpich_shm_*"
CLOCK_S = 1.0  # the kernel's clock for file times lags by a few milliseconds
LOOKS_S = 0.5  # between two checks: a rank maps its segment a moment after it has created it


def remove_left_behind(since: float, folder: Path | None = None) -> list[str]:
    """Remove unused rings of this user, and segments created after `since` (Unix time) that no process maps.

    Returns their names.

    Returns immediately if there are none.
    """
    left = _unused(folder, since)
    if not left:
        return []
    time.sleep(LOOKS_S)
    left = left & _unused(folder, since)
    for path in left:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in left)


def _unused(folder: Path | None, since: float) -> set[Path]:
    rings = unused_rings(folder) if folder else unused_rings()
    ours = {}
    for path in (folder or FOLDER).glob(_PATTERN):
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_mtime >= since - CLOCK_S:
            ours[path] = facts.st_ino
    used = set(_mapped(_PATTERN.rstrip("*"))) if ours else set()
    return rings | {path for path, inode in ours.items() if inode not in used}


def _mapped(name: str) -> Iterator[int]:
    """Return the inodes of the files with `name` in their path that running processes map (proc_pid_maps(5))."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except (
            OSError,
            ProcessLookupError,
        ):  # it has exited, or belongs to another user, who cannot open these segments
            continue
        yield from (int(line.split(None, 5)[4]) for line in lines if name in line)
