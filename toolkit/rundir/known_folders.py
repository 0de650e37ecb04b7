"""The per-user index of the folders of runs, by which commands in any folder find runs. It may be removed at any time.

It is a folder with one small file for each folder of runs: ~/.cache/toolkit/folders, or TOOLKIT_INDEX. Hosts that share
a home write it at the same time, so each file is complete before it gets its name.
"""

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from toolkit.errors import DamagedFileError
from toolkit.rundir.files import read_json, typed_path, write_json
from toolkit.terminal.talk import say

__all__ = ["known_folders", "record_folder"]

RESPONSE_S = 3.0


def record_folder(runs: Path) -> None:
    """Record a folder of runs in the index. If the home is not writable, only report it: runs do not need the index."""
    place = f"the home of user {os.getuid()}"
    try:
        index = _index()
        place = str(index)
        file = index / f"known-{hashlib.sha256(os.fsencode(runs)).hexdigest()[:16]}.json"
        record = {"path": str(runs), "parent_inode": _inode(runs.parent)}
        if _record_of(file) == record:
            return
        index.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = index / f".{file.stem}.{secrets.token_hex(4)}"  # processes of several hosts may write the same file
        write_json(draft, record, mode=0o600, durable=False)
        draft.replace(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = getattr(error, "strerror", None) or error
        say(
            f"cannot record {runs} in {place}: {reason}; commands in other folders need --runs {runs}, or set "
            "TOOLKIT_INDEX to a writable folder"
        )


def known_folders(present: Path) -> list[Path]:
    """Return the readable folders of runs in the index except `present`, sorted by path.

    One whose file system does not respond is skipped with a message, because it must not stop commands elsewhere.
    """
    found: dict[Path, tuple[int, int]] = {}
    lookups = {
        record["path"]: threading.Thread(target=_look, args=(file, record, found), daemon=True)
        for file, record in _recorded()
    }
    for lookup in lookups.values():
        lookup.start()
    deadline = time.monotonic() + RESPONSE_S
    for path, lookup in lookups.items():
        lookup.join(max(0.0, deadline - time.monotonic()))
        if lookup.is_alive():
            say(f"skipping the runs in {path}: the file system did not respond within {RESPONSE_S:.0f} s")
    folders, seen = [], {_identity(present)}
    for folder, identity in sorted(found.items()):  # a link may give a folder two paths
        if identity not in seen:
            seen.add(identity)
            folders.append(folder)
    return folders


def _look(file: Path, record: dict[str, str], found: dict[Path, tuple[int, int]]) -> None:
    """Add the folder of a record to `found` if it can be read; remove the record if the folder was removed."""
    folder = Path(record["path"])
    identity = _identity(folder)
    if identity is not None and os.access(folder, os.R_OK | os.X_OK):
        found[folder] = identity
    elif identity is None and _is_removed(folder, record["parent_inode"]):
        _forget(file)


def _recorded() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the files of the index with their contents; remove files that are damaged."""
    try:
        files = list(_index().glob("known-*.json"))
    except (OSError, RuntimeError):  # this user has no readable home, so nothing is recorded
        return
    for file in files:
        try:
            record = _record_of(file)
        except OSError:  # for example, another host replaced the file just now (a stale handle of NFS)
            continue
        if record is None:
            _forget(file)
        else:
            yield file, record


def _forget(file: Path) -> None:
    with suppress(OSError):  # another process has removed it, or the home is read-only
        file.unlink()


def _record_of(file: Path) -> dict[str, str] | None:
    """Return the contents of a file of the index; None if it does not exist or is damaged."""
    try:
        record: dict[str, str] = read_json(file)
    except (FileNotFoundError, DamagedFileError):
        return None
    return record


def _is_removed(folder: Path, parent_inode: str) -> bool:
    """Return True if the parent is the recorded one and lacks the folder; an unmounted file system has no such parent."""
    try:
        folder.lstat()
    except FileNotFoundError:
        with suppress(OSError):
            return _inode(folder.parent) == parent_inode
    except OSError:  # the user may not search the parent, or the mount is dead
        pass
    return False


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder; None if it does not exist, or its parent cannot be read."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _inode(folder: Path) -> str:
    # Other hosts mount other file systems at the same path, and their folders have other inodes.
    return str(folder.stat().st_ino)


def _index() -> Path:
    chosen = os.environ.get("TOOLKIT_INDEX")
    return typed_path(chosen).absolute() if chosen else Path.home() / ".cache" / "toolkit" / "folders"
