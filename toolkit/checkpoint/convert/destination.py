"""Where an export goes: written beside its place, brought to the disk, and moved there when it is complete.

What stands there already is kept, unless it is to be replaced: then a file of that name is, and in a folder the files
that an export may have written. Others (a model's `config.json`) stay. A checkpoint is never written into.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.checkpoint.format.layout import MANIFEST, aside_of, step_of
from toolkit.checkpoint.format.manifest_file import FORMAT
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import sync

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP,
)  # fmt: skip
_MANIFEST_BEGINS = f'{{"format": "{FORMAT}"'.encode()
_LETTERS_OF_NAME = 40  # of four bytes at most: a file's own name may have all 255 bytes already


def true_place(named: Path) -> Path:
    """Where a destination really is, links followed.

    Raises:
        ToolkitError: it is no file or folder (a pipe, a device), lies inside a checkpoint, or is named like one.
    """
    with told_in_words(named):
        if named.exists() and not named.is_file() and not named.is_dir():
            raise ToolkitError("is no regular file", where=str(named), fix="name another file")
        try:
            place = named.resolve()
        except RuntimeError:
            raise ToolkitError("is a link that leads to itself", where=str(named), fix="name another place") from None
        refuse_checkpoint(named)
    return place


def refuse_checkpoint(final: Path) -> None:
    """Files among those of a checkpoint damage it, and a folder with a step's name would be taken for one.

    Raises:
        ToolkitError: `final` is a checkpoint or inside of one, committed or not, or is named like one.
    """
    place = final.resolve()
    for folder in (final, place, *place.parents):
        if not _is_checkpoint(folder):
            continue
        if folder in (final, place) and not final.exists():
            fix = f"give it another name, such as {final.with_name(final.name.replace('step-', 'export-'))}"
            raise ToolkitError("is a checkpoint's name", where=str(final), fix=fix)
        what = "is a checkpoint" if folder in (final, place) else f"is inside the checkpoint {folder.name}"
        raise ToolkitError(what, where=str(final), fix=f"name a place outside of {folder}")


def _is_checkpoint(folder: Path) -> bool:
    """By its name, or by its manifest: other programs have files of that name, too."""
    if step_of(folder) is not None or aside_of(folder) is not None:
        return True
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        with manifest.open("rb") as file:
            ours = file.read(len(_MANIFEST_BEGINS)) == _MANIFEST_BEGINS
        return ours or any(folder.glob("shard-*-of-*.h5"))
    except PermissionError:  # nobody can say that it is none
        return True


@contextmanager
def new_file(final: Path, *, replace: bool) -> Iterator[Path]:
    """A path beside `final` to write to; the file takes its place when the context ends without an error.

    Raises:
        ToolkitError: `final` exists and is not to be replaced, is a folder, or is inside a checkpoint.
        OwnFailureError: the disk is full.
    """
    with told_in_words(final):
        _refuse_file(final, replace=replace)
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = _aside(final)
        try:
            yield aside
            sync(aside)
            _refuse_file(final, replace=replace)
            aside.replace(final)
            sync(final.parent)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def new_files(final: Path, patterns: Sequence[str], *, replace: bool, last: Callable[[str], bool]) -> Iterator[Path]:
    """A folder to write to, beside or inside `final`; its files move into `final` when the context ends without an error.

    Args:
        patterns: names (globs) of what an export of this format may leave, older ones' files included.
        last: says of a file whether a reader begins with it. It is removed first and moved last: who reads meanwhile
            finds no beginning, and never two exports mixed.

    Raises:
        ToolkitError: `final` holds such files, and they are not to be replaced; or it is no folder, or a checkpoint.
        OwnFailureError: the disk is full.
    """
    with told_in_words(final):
        _refuse_folder(final, patterns, replace=replace)
        final.parent.mkdir(parents=True, exist_ok=True)
        # Inside a folder that is there: it may be a file system of its own, or the one above it somebody else's.
        aside = final / f".export.part-{os.getpid()}" if final.is_dir() else _aside(final)
        aside.mkdir()
        try:
            yield aside
            for path in aside.iterdir():
                sync(path)
            sync(aside)
            _refuse_folder(final, patterns, replace=replace)
            _move(aside, final, patterns, last)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _move(aside: Path, final: Path, patterns: Sequence[str], last: Callable[[str], bool]) -> None:
    if aside.parent == final:
        for path in sorted(_older(final, patterns), key=lambda path: not last(path.name)):
            path.unlink()
        for path in sorted(aside.iterdir(), key=lambda path: (last(path.name), path.name)):
            path.rename(final / path.name)
        sync(final)
        return
    aside.rename(final)
    sync(final.parent)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name[:_LETTERS_OF_NAME]}.part-{os.getpid()}")


def _older(final: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in final.glob(pattern)}) if final.is_dir() else []


def _refuse_file(final: Path, *, replace: bool) -> None:
    refuse_checkpoint(final)
    if final.is_dir():
        raise ToolkitError("is a folder", where=str(final), fix=f"name a file, such as {final / 'model.pt'}")
    if final.exists() and not final.is_file():  # a device, say
        raise ToolkitError("is no regular file", where=str(final), fix="name another file")
    if final.exists() and not replace:
        raise ToolkitError("exists already", where=str(final), fix="name another file, or replace it with --force")


def _refuse_folder(final: Path, patterns: Sequence[str], *, replace: bool) -> None:
    refuse_checkpoint(final)
    if final.exists() and not final.is_dir():
        raise ToolkitError("is a file", where=str(final), fix="name a folder")
    older = _older(final, patterns)
    if older and not replace:
        raise ToolkitError(
            f"holds {older[0].name} already", where=str(final), fix="name another folder, or replace it with --force"
        )


@contextmanager
def told_in_words(final: Path) -> Iterator[None]:
    """What the system refuses about the destination; what it refuses elsewhere is somebody else's to tell."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        named = Path(os.fsdecode(error.filename)) if error.filename is not None else final
        elsewhere = final.parent not in (named, *named.parents) and named not in final.parents
        if elsewhere or number not in (*_NO_ROOM, *_NO_PLACE):
            raise
        fix = "free space there, or name another place" if number in _NO_ROOM else "name a place that you can write to"
        if number == errno.ENAMETOOLONG:
            fix = "give a shorter name"
        kind = OwnFailureError if number in _NO_ROOM else ToolkitError
        raise kind(f"cannot be written: {os.strerror(number)}", where=str(final), fix=fix) from error
