"""Where an export goes: written beside its place, brought to the disk, and moved there when it is complete.

What stands there already is kept, unless it is to be replaced; and then only what an export wrote is. A folder may hold
other files (a model's `config.json`), which stay.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import sync

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def new_file(final: Path, *, replace: bool) -> Iterator[Path]:
    """A path beside `final` to write to; the file takes its place when the context ends without an error.

    Raises:
        ToolkitError: `final` exists and is not to be replaced, or is a folder.
        OwnFailureError: the disk is full.
    """
    _refuse_file(final, replace=replace)
    with told_in_words(final):
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
        ToolkitError: `final` holds such files, and they are not to be replaced; or it is no folder.
        OwnFailureError: the disk is full.
    """
    _refuse_folder(final, patterns, replace=replace)
    with told_in_words(final):
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
    return final.with_name(f".{final.name}.part-{os.getpid()}")


def _older(final: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in final.glob(pattern)}) if final.is_dir() else []


def _refuse_file(final: Path, *, replace: bool) -> None:
    if final.is_dir():
        raise ToolkitError("is a folder", where=str(final), fix=f"name a file, such as {final / 'model.pt'}")
    if final.exists() and not final.is_file():  # a device, say
        raise ToolkitError("is no regular file", where=str(final), fix="name another file")
    if final.exists() and not replace:
        raise ToolkitError("exists already", where=str(final), fix="name another file, or replace it with --force")


def _refuse_folder(final: Path, patterns: Sequence[str], *, replace: bool) -> None:
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
        elsewhere = final.parent not in (named, *named.parents)
        if elsewhere or number not in (*_NO_ROOM, *_NOT_ALLOWED):
            raise
        fix = "free space there, or name another place" if number in _NO_ROOM else "name a place that you can write to"
        kind = OwnFailureError if number in _NO_ROOM else ToolkitError
        raise kind(f"cannot be written: {os.strerror(number)}", where=str(final), fix=fix) from error
