"""The folder in which torch compiles extensions, such as DeepSpeed's operators, at their first use. Standard library only."""

import fcntl
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json
from toolkit.terminal.talk import say_beside

__all__ = ["prepare_extensions"]

POLL_S = 1.0


def prepare_extensions(*packages: str) -> Path:
    """Keep compiled operators on this node's disk, by the versions of torch, Python and `packages`; return the folder.

    It sets `TORCH_EXTENSIONS_DIR` unless that is set. There it waits for other programs that compile, and removes locks of
    dead ones: torch would wait for those forever, and fail when another program removes them. Call it before the first use.

    Raises:
        ToolkitError: the folder belongs to another user.
    """
    if given := os.environ.get(
        "TORCH_EXTENSIONS_DIR"
    ):  # it may be on a shared file system, where a lock's process is unknown
        return Path(given)
    folder = Path(_local_scratch(), f"toolkit-extensions-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:  # programs load libraries from it
        raise ToolkitError("other users can write to this folder", where=str(folder), fix="remove it")
    versions = "-".join(f"{name}{version(name)}" for name in ("torch", *packages))
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder /= f"{versions}-{python}"
    folder.mkdir(exist_ok=True)
    is_told = False
    while held := _held_locks(folder):
        if not is_told:
            say_beside(f"waiting for a process that compiles: {held[0]}")
        is_told = True
        time.sleep(POLL_S)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    return folder


def _local_scratch() -> str:
    """Return the site's folder on a node-local disk, else that for temporary files."""
    path = os.environ.get("TOOLKIT_RESOLVED_JOB")
    named = (read_json(Path(path)).get("paths") or {}).get("local_scratch") if path else ""
    return os.path.expandvars(str(named or "")) or tempfile.gettempdir()


def _held_locks(folder: Path) -> list[Path]:
    """Return the locks of processes that compile, and remove those of dead ones."""
    held = []
    with (folder / "checked").open("w") as checked:
        fcntl.flock(checked, fcntl.LOCK_EX)  # else a rank could remove the lock that another one has just created
        for lock in folder.glob("*/lock"):
            if _is_open(lock):
                held.append(lock)
            elif lock.exists():
                lock.unlink(missing_ok=True)
                say_beside(f"removed {lock}, which a process left that died while it compiled")
    return held


def _is_open(path: Path) -> bool:
    """Return whether a process of this user on this node has the file open, as torch does while it compiles."""
    try:
        wanted = path.stat()
    except FileNotFoundError:  # the process has finished
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(descriptor.stat(), wanted):
                return True
        except OSError:  # the process has ended, or is another user's
            continue
    return False
