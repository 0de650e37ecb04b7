"""Shared memory that killed MPICH ranks leave on a node: 2 MiB or more of its memory each time, until it boots again.

MPICH unlinks its segment at MPI_Finalize only. Its name tells no job, so what is removed is ours, newer than the start that
it is removed by, and in no process's memory any more: no other job can have a use for that.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
_PATTERN = "mpich_shm_*"
CLOCK_S = 1.0  # the kernel's clock for files is a few milliseconds late
LOOKS_S = 0.5  # between two looks: a rank maps its segment a moment after it has made it


def remove_left_behind(since: float, folder: Path = FOLDER) -> list[str]:
    """Remove this user's segments made after `since` (seconds since the epoch) that no process has in its memory; their names.

    Takes no time where there is none.
    """
    left = _unused(folder, since)
    if not left:
        return []
    time.sleep(LOOKS_S)
    left = left & _unused(folder, since)
    for path in left:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in left)


def _unused(folder: Path, since: float) -> set[Path]:
    ours = {}
    for path in folder.glob(_PATTERN):
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_mtime >= since - CLOCK_S:
            ours[path] = facts.st_ino
    used = set(_mapped(_PATTERN.rstrip("*"))) if ours else set()
    return {path for path, inode in ours.items() if inode not in used}


def _mapped(name: str) -> Iterator[int]:
    """Inodes of the files with `name` in their path that living processes have in their memory (proc_pid_maps(5))."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, ProcessLookupError):  # it has ended, or is another user's, who cannot have opened ours
            continue
        yield from (int(line.split(None, 5)[4]) for line in lines if name in line)
