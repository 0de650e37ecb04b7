"""From a folder of files to a committed checkpoint and, later, out of the way.

The rename of `step-X.part-A-N` to `step-X` is the commit. Before it every file and the folder are on the
disk; after it the parent is. A folder is never deleted under its committed name: it is renamed first, so that
a deletion that stops halfway leaves no damaged checkpoint behind.
"""

from __future__ import annotations

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
from toolkit.talk import say_beside


def make_checkpoints_folder(directory: Path) -> None:
    """Make the folder around the checkpoints: in a run as open as the run, elsewhere as the umask says."""
    new = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    if not new:
        return
    if is_of_a_run(directory):
        with suppress(FileExistsError):
            make_folder(directory)
    else:
        directory.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)  # else a power cut may take the name of the folder that holds all checkpoints


def open_part(final: Path, attempt: int, token: int, *, spare: Path | None = None) -> Path:
    """Make the folder in which `attempt` writes the checkpoint `final`.

    What a failed save of the same attempt left there is removed. In a run the folder is as open as the run, elsewhere
    as the umask says.

    Args:
        token: a number that no other process has. Ranks open their files by name: where another process that thinks it is
            the same attempt has put their folder aside, they must fail, and not write into the other's.
        spare: a folder that is no checkpoint any more; it becomes the part, with the files that it has.
    """
    make_checkpoints_folder(final.parent)
    for left in parts_of(final, attempt):
        with suppress(FileNotFoundError):  # whose it is may remove it, too
            discard_later(set_aside(left, "stale", attempt))
    part = part_folder(final, attempt, token)
    if spare is not None and _can_serve_again(spare):
        for name in (MANIFEST, INDEX):
            (spare / name).unlink(missing_ok=True)
        spare.rename(part)
    elif is_of_a_run(final.parent):
        make_folder(part)
    else:
        part.mkdir()
    return part


def _can_serve_again(spare: Path) -> bool:
    """Whether a folder is one of ours, as open as a new one would be, with files that may be written over.

    People link, lock and fill old checkpoints as they like. Such a folder goes as it is.
    """
    try:
        with os.scandir(spare) as entries:
            own = all(entry.is_file(follow_symlinks=False) and os.access(entry.path, os.W_OK) for entry in entries)
        own = own and not spare.is_symlink() and os.access(spare, os.W_OK)
        if own and is_of_a_run(spare.parent):
            spare.chmod(stat.S_IMODE(spare.parent.stat().st_mode))
        elif own:
            spare.chmod(0o777 & ~_umask())
    except FileNotFoundError:
        return False
    except OSError:
        own = False
    if not own:
        discard_later(spare)
    return own


def _umask() -> int:
    """This process's: the system tells it only to who sets it, or to who reads its own state."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def refuse_existing(final: Path) -> None:
    """A checkpoint is never written over.

    Raises:
        ToolkitError: when `final` exists.
    """
    if final.exists():
        raise ToolkitError("checkpoint exists already", where=str(final), fix="save under another name, or remove it")


def commit(part: Path, final: Path, attempt: int, *, replace: bool = False) -> None:
    """Make the finished folder `part` the checkpoint `final`.

    With `replace` the run's line ends here: an older `final` is deleted after the commit, and checkpoints of
    later steps, which belong to a line that the run has left, get the suffix `.left-<attempt>`.

    Raises:
        OwnFailureError, ToolkitError: with `replace`, when another attempt or process has the folder.
        OSError: with `replace`, when this host cannot read whose the checkpoints in the way are; the disk did not take it.
    """
    sync(part)
    if replace:
        hold_folder(final.parent, attempt)
    older = _make_room(final, attempt) if replace else None
    try:
        if replace:
            hold_folder(final.parent, attempt)
        _give_name(part, final)
    except BaseException:
        if older is not None and not final.exists():  # else a save that failed has taken a checkpoint away
            older.rename(final)
            sync(final.parent)
        raise
    if older is not None:
        discard_later(older)


def _give_name(part: Path, final: Path) -> None:
    """The commit. It is taken back where the new name cannot be brought to the disk: a save that failed leaves none.

    Raises:
        OSError: the checkpoint is not committed.
        OwnFailureError: it stands there, and a power cut may take it away.
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
                f"{final.name} is complete, but its name may not outlive a power cut: {os.strerror(error.errno or 0)}",
                where=str(final.parent),
            ) from error
        # Its files must not go while the disk may still give the folder its committed name.
        sync(final.parent)
        raise


def _make_room(final: Path, attempt: int) -> Path | None:
    """Set aside what must not stand beside `final`, and return the older `final` under its new name.

    Before the commit and not after it: whoever is killed in between resumes on the right line, only earlier.
    """
    step = step_of(final)
    steps = committed_steps(final.parent)
    left = [folder for later, folder in steps.items() if step is not None and later > step]
    older = final if final.exists() else None
    for folder in filter(None, [*left, older]):
        _refuse_newer(folder, attempt)
    for folder in left:
        aside = set_aside(folder, "left", attempt)
        say_beside(f"{folder.name} is of a line that this run has left; it was moved to {aside}")
    return set_aside(older, "replaced", attempt) if older is not None else None


def _refuse_newer(folder: Path, attempt: int) -> None:
    """Leave alone what a later attempt of the run saved.

    A listing of attempts may be old (NFS), and then this checkpoint is all that tells of them. A damaged one tells
    nothing: nobody loads it, so it may go aside. One that this host cannot read may be a later attempt's, and stays.

    Raises:
        OwnFailureError: a later attempt saved it.
        OSError: it cannot be read.
        ToolkitError: another version of toolkit wrote it.
    """
    if not is_of_a_run(folder.parent):
        return
    with suppress(CorruptCheckpointError):
        owner = read_manifest(folder).attempt
        if owner > attempt:
            raise given_up(folder, attempt, owner)


def set_aside(folder: Path, word: str, attempt: int) -> Path:
    """Rename a checkpoint so that nothing loads it, and return its new place.

    Args:
        word: why. `bad`: damaged. `stale`: a part of an attempt that was given up on. `left`: of a line
            that the run left by resuming from an older step. `replaced`: making room for a newer save of
            the same step. `removed`: about to be deleted.
    """
    base = folder.name if aside_of(folder) is None else folder.name.rsplit(".", 1)[0]
    aside = folder.with_name(f"{base}.{word}-{attempt}")
    number = 2
    while aside.exists():
        aside = folder.with_name(f"{base}.{word}-{attempt}-{number}")
        number += 1
    folder.rename(aside)
    sync(folder.parent)
    return aside


def take_over(directory: Path, attempt: int) -> None:
    """Put a `checkpoints` folder in order for a new attempt.

    Parts of older attempts are renamed, then removed: ranks that were given up on but still run can no longer
    commit. A checkpoint that was renamed to make room for a newer save which never came gets its name back.
    Deletions that were cut short are finished.

    Raises:
        OwnFailureError: this host cannot read the folder, or cannot rename in it.
    """
    try:
        _put_in_order(directory, attempt)
    except OSError as error:
        raise host_cannot_read(error, directory, "cannot be put in order") from None


def _put_in_order(directory: Path, attempt: int) -> None:
    if _others_write(directory, attempt):
        return
    for folder in entries_of(directory):
        aside = aside_of(folder)
        if aside is None:
            continue
        committed, word, owner = aside
        if word == "part" and owner < attempt:
            discard_later(set_aside(folder, "stale", owner))
        elif word == "replaced" and not (directory / committed).exists():
            folder.rename(directory / committed)
            sync(directory)
        elif word in ("removed", "replaced", "stale"):
            discard_later(folder)


def _others_write(directory: Path, attempt: int) -> bool:
    """True where what lies about may be in use: by another process, or by another object of this one for the same attempt.

    Whoever only reads there need not be told; a save is refused by name.
    """
    try:
        owner = refuse_others(directory, attempt)
    except ToolkitError:
        return True
    me = Writer.here(attempt)
    return owner is not None and owner.is_same_process(me) and owner.attempt == attempt
