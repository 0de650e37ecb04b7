"""Commits a folder of files as a checkpoint, and renames checkpoints that must not be loaded.

The commit syncs every file and the folder, renames `step-X.part-A-N` to `step-X`, and syncs the parent folder. A
committed folder is renamed before its deletion, so that an interrupted deletion leaves no damaged checkpoint.
"""

import ctypes
import os
import stat
from contextlib import suppress
from pathlib import Path

from toolkit.checkpoint.errors import CorruptCheckpointError, host_cannot_read
from toolkit.checkpoint.folder.deletion import discard_later
from toolkit.checkpoint.folder.writer_lock import Writer, given_up, hold_folder, is_of_a_run, refuse_others
from toolkit.checkpoint.format.layout import (
    INDEX,
    MANIFEST,
    aside_of,
    committed_steps,
    entries_of,
    part_folder,
    parts_of,
    step_of,
)
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import make_folder, sync
from toolkit.terminal.talk import say_beside

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def make_checkpoints_folder(directory: Path) -> None:
    """Make the `checkpoints` folder. In a run directory it gets the mode of the run, elsewhere the umask applies."""
    new = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    if not new:
        return
    if is_of_a_run(directory):
        with suppress(FileExistsError):
            make_folder(directory)
    else:
        directory.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)  # otherwise a power failure could lose the new directory entry, and all checkpoints


def open_part(final: Path, attempt: int, token: int, *, spare: Path | None = None) -> Path:
    """Make the folder in which `attempt` writes `final`, and remove part folders that its failed saves left.

    `token` is unique to a process, so that ranks fail to open files after another process has renamed their folder.
    `spare`, the folder of a removed checkpoint, becomes the part folder and keeps its files.
    """
    make_checkpoints_folder(final.parent)
    for left in parts_of(final, attempt):
        with suppress(FileNotFoundError):  # the process that wrote the folder may remove it, too
            discard_later(move_aside(left, "stale", attempt))
    part = part_folder(final, attempt, token)
    if spare is not None and _is_reusable(spare):
        for name in (MANIFEST, INDEX):
            (spare / name).unlink(missing_ok=True)
        spare.rename(part)
    elif is_of_a_run(final.parent):
        make_folder(part)
    else:
        part.mkdir()
    return part


def _is_reusable(spare: Path) -> bool:
    """Set the mode of a folder and return True if a save may overwrite its files; else delete it and return False."""
    try:
        with os.scandir(spare) as entries:
            is_own = all(entry.is_file(follow_symlinks=False) and os.access(entry.path, os.W_OK) for entry in entries)
        is_own = is_own and not spare.is_symlink() and os.access(spare, os.W_OK)
        if is_own and is_of_a_run(spare.parent):
            spare.chmod(stat.S_IMODE(spare.parent.stat().st_mode))
        elif is_own:
            spare.chmod(0o777 & ~_umask())
    except FileNotFoundError:
        return False
    except OSError:
        is_own = False
    if not is_own:
        discard_later(spare)
    return is_own


def _umask() -> int:
    """Return the umask of this process, from /proc, because os.umask can read it only by changing it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def refuse_existing(final: Path) -> None:
    """Raise a ToolkitError if the checkpoint `final` exists."""
    if final.exists():
        raise ToolkitError("checkpoint already exists", where=str(final), fix="use another name, or delete this folder")


def refuse_foreign(final: Path) -> None:
    """Raise a ToolkitError if `final` exists but is not a checkpoint, because to overwrite it would delete its files."""
    if final.is_symlink() or (final.exists() and not (final / MANIFEST).is_file()):
        message = "exists and is not a checkpoint, so `overwrite` does not replace it"
        raise ToolkitError(message, where=str(final), fix="use another name, or delete it")


def put_back(final: Path, attempt: int) -> None:
    """Give an older checkpoint its name again if `_overwrite` was interrupted between its two renames."""
    older = final.with_name(f"{final.name}.replaced-{attempt}")
    if older.is_dir() and not final.exists():
        older.rename(final)
        sync(final.parent)


def commit(part: Path, final: Path, attempt: int, *, replace: bool = False, overwrite: bool = False) -> None:
    """Make the finished folder `part` the checkpoint `final`.

    With `replace`, an older `final` is deleted after the commit, and checkpoints of later steps, which belong to an
    abandoned history, get the suffix `.left-<attempt>`. With `overwrite`, only an older `final` is deleted.

    Raises:
        OwnFailureError, ToolkitError: with `replace`, another attempt or process owns the folder.
        OSError: a disk operation failed, or with `replace`, a manifest of an older checkpoint could not be read.
    """
    sync(part)
    if overwrite and final.exists():
        _overwrite(part, final, attempt)
        return
    if replace:
        hold_folder(final.parent, attempt)
    older = _move_conflicts_aside(final, attempt) if replace else None
    try:
        if replace:
            hold_folder(final.parent, attempt)
        _rename_to_final(part, final)
    except BaseException:
        if older is not None and not final.exists():  # otherwise a failed save would remove a good checkpoint
            older.rename(final)
            sync(final.parent)
        raise
    if older is not None:
        discard_later(older)


def _overwrite(part: Path, final: Path, attempt: int) -> None:
    """Replace the checkpoint `final` by `part` in one step, or in two renames on file systems that cannot exchange."""
    refuse_foreign(final)
    if _exchanged(part, final):
        sync(final.parent)
        discard_later(part)
        return
    older = move_aside(final, "replaced", attempt)
    try:
        _rename_to_final(part, final)
    except BaseException:
        put_back(final, attempt)
        raise
    discard_later(older)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False if the C library or the file system (NFS) cannot do this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _rename_to_final(part: Path, final: Path) -> None:
    """Rename `part` to `final`; undo this if the new name cannot be synced, so that a failed save leaves no checkpoint.

    Raises OSError if the checkpoint is not committed, and OwnFailureError if it is but may not survive a power failure.
    """
    refuse_existing(final)
    part.rename(final)
    try:
        sync(final.parent)
    except OSError as error:
        try:
            final.rename(part)
        except OSError:
            raise OwnFailureError(
                f"{final.name} is complete, but its name may not survive a power failure: {os.strerror(error.errno or 0)}",
                where=str(final.parent),
            ) from error
        # Without this sync, the committed name could reappear after a power failure, while the files are being deleted.
        sync(final.parent)
        raise


def _move_conflicts_aside(final: Path, attempt: int) -> Path | None:
    """Rename checkpoints of later steps and an older `final`. Returns the new path of the older `final`, or None.

    This precedes the commit, so that a run that is killed in between does not resume from an abandoned history.
    """
    step = step_of(final)
    steps = committed_steps(final.parent)
    left = [folder for later, folder in steps.items() if step is not None and later > step]
    older = final if final.exists() else None
    for folder in filter(None, [*left, older]):
        _refuse_newer(folder, attempt)
    for folder in left:
        aside = move_aside(folder, "left", attempt)
        abandoned = f"{folder.name} belongs to a history that this run has abandoned"
        say_beside(f"{abandoned}, because it continued from an earlier step; renamed it to {aside}")
    return move_aside(older, "replaced", attempt) if older is not None else None


def _refuse_newer(folder: Path, attempt: int) -> None:
    """Raise an OwnFailureError if a later attempt saved this checkpoint; NFS may not list that attempt yet.

    A damaged checkpoint may be renamed, because no attempt loads it. Other errors of reading the manifest are raised,
    because a later attempt may have saved the checkpoint.
    """
    if not is_of_a_run(folder.parent):
        return
    with suppress(CorruptCheckpointError):
        owner = read_manifest(folder).attempt
        if owner > attempt:
            raise given_up(folder, attempt, owner)


def move_aside(folder: Path, reason: str, attempt: int) -> Path:
    """Rename a checkpoint so that no load uses it, and return its new path.

    `reason` is part of the new name. `bad`: damaged. `stale`: a part folder of an abandoned attempt. `left`: the step
    is later than the one from which the run continued. `replaced`: the step was saved again. `removed`: to be deleted.
    """
    base = folder.name if aside_of(folder) is None else folder.name.rsplit(".", 1)[0]
    aside = folder.with_name(f"{base}.{reason}-{attempt}")
    number = 2
    while aside.exists():
        aside = folder.with_name(f"{base}.{reason}-{attempt}-{number}")
        number += 1
    folder.rename(aside)
    sync(folder.parent)
    return aside


def take_over(directory: Path, attempt: int) -> None:
    """Clean up a `checkpoints` folder for a new attempt. Raises OwnFailureError if this host cannot do so.

    Renames part folders of older attempts before deleting them, so that their ranks, if still running, cannot commit.
    Restores the name of a checkpoint whose replacement was not saved completely. Finishes interrupted deletions.
    """
    try:
        _put_in_order(directory, attempt)
    except OSError as error:
        raise host_cannot_read(error, directory, "cannot be cleaned up for a new attempt") from None


def _put_in_order(directory: Path, attempt: int) -> None:
    if _others_write(directory, attempt):
        return
    for folder in entries_of(directory):
        aside = aside_of(folder)
        if aside is None:
            continue
        committed, reason, owner = aside
        if reason == "part" and owner < attempt:
            discard_later(move_aside(folder, "stale", owner))
        elif reason == "replaced" and not (directory / committed).exists():
            folder.rename(directory / committed)
            sync(directory)
        elif reason in ("removed", "replaced", "stale"):
            discard_later(folder)


def _others_write(directory: Path, attempt: int) -> bool:
    """Return whether another process, or another Checkpointer of this process and attempt, may be using the folder."""
    try:
        owner = refuse_others(directory, attempt)
    except ToolkitError:
        return True
    me = Writer.here(attempt)
    return owner is not None and owner.is_same_process(me) and owner.attempt == attempt
