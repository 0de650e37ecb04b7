"""The destination of an export: written beside its final path, synced to the disk, and renamed when it is complete.

`replace` permits replacing a file of that name, and in a folder the files that an export may have written. Others (a
model's `config.json`) remain. Nothing is written into a checkpoint.
"""

import errno
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.checkpoint.format.layout import MANIFEST, aside_of, step_of
from toolkit.checkpoint.format.manifest_file import FORMAT
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.files import sync

__all__ = ["resolve_destination"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP,
)  # fmt: skip
_MANIFEST_PREFIX = f'{{"format": "{FORMAT}"'.encode()
_NAME_CHARACTERS = 40  # of at most four bytes each: a file's own name may have all 255 bytes already


def resolve_destination(named: Path) -> Path:
    """The path with links followed; ToolkitError for a pipe, a device, or a path in or named like a checkpoint."""
    with writing_to(named):
        if named.exists() and not named.is_file() and not named.is_dir():
            raise ToolkitError("is not a regular file", where=str(named), fix="name another file")
        try:
            resolved = named.resolve()
        except RuntimeError:
            raise ToolkitError("is a link to itself", where=str(named), fix="name another path") from None
        refuse_checkpoint(named)
    return resolved


def refuse_checkpoint(final: Path) -> None:
    """Raise a ToolkitError for a checkpoint, committed or not, a path inside one, or the name of one."""
    resolved = final.resolve()
    for folder in (final, resolved, *resolved.parents):
        if not _is_checkpoint(folder):
            continue
        if folder in (final, resolved) and not final.exists():
            fix = f"choose another name, such as {final.with_name(final.name.replace('step-', 'export-'))}"
            raise ToolkitError("is a checkpoint's name", where=str(final), fix=fix)
        problem = "is a checkpoint" if folder in (final, resolved) else f"is inside the checkpoint {folder.name}"
        raise ToolkitError(problem, where=str(final), fix=f"name a path outside of {folder}")


def _is_checkpoint(folder: Path) -> bool:
    """By its name or its manifest's contents: other programs also write files named manifest.json."""
    if step_of(folder) is not None or aside_of(folder) is not None:
        return True
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        with manifest.open("rb") as file:
            is_ours = file.read(len(_MANIFEST_PREFIX)) == _MANIFEST_PREFIX
        return is_ours or any(folder.glob("shard-*-of-*.h5"))
    except PermissionError:  # it may be one
        return True


@contextmanager
def new_file(final: Path, *, replace: bool) -> Iterator[Path]:
    """A path beside `final` to write to; renamed to `final` when the context ends without an error.

    Raises ToolkitError if `final` must not be replaced, and OwnFailureError if the disk is full.
    """
    with writing_to(final):
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
def new_files(final: Path, patterns: Sequence[str], *, replace: bool, last: Collection[str]) -> Iterator[Path]:
    """A folder to write to, beside or in `final`; its files move into `final` when the context ends without an error.

    Replaces the files of `patterns`, globs of what this and earlier exports may leave. A reader opens the files `last`
    first: they are removed first and moved last, so that a concurrent reader fails instead of reading a mixture of two.
    Raises ToolkitError if `final` must not be replaced, and OwnFailureError if the disk is full.
    """
    with writing_to(final):
        _refuse_folder(final, patterns, replace=replace)
        final.parent.mkdir(parents=True, exist_ok=True)
        # Inside an existing folder, because it may be a mount point, or its parent may not be writable.
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


def _move(aside: Path, final: Path, patterns: Sequence[str], last: Collection[str]) -> None:
    if aside.parent == final:
        for path in sorted(_earlier_files(final, patterns), key=lambda path: path.name not in last):
            path.unlink()
        for path in sorted(aside.iterdir(), key=lambda path: (path.name in last, path.name)):
            path.rename(final / path.name)
        sync(final)
        return
    aside.rename(final)
    sync(final.parent)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name[:_NAME_CHARACTERS]}.part-{os.getpid()}")


def _earlier_files(final: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in final.glob(pattern)}) if final.is_dir() else []


def _refuse_file(final: Path, *, replace: bool) -> None:
    refuse_checkpoint(final)
    if final.is_dir():
        raise ToolkitError("is a folder", where=str(final), fix=f"name a file, such as {final / 'model.pt'}")
    if final.exists() and not final.is_file():  # a device, say
        raise ToolkitError("is not a regular file", where=str(final), fix="name another file")
    if final.exists() and not replace:
        raise ToolkitError("exists already", where=str(final), fix="name another file, or replace it with --force")


def _refuse_folder(final: Path, patterns: Sequence[str], *, replace: bool) -> None:
    refuse_checkpoint(final)
    if final.exists() and not final.is_dir():
        raise ToolkitError("is a file", where=str(final), fix="name a folder")
    earlier = _earlier_files(final, patterns)
    if earlier and not replace:
        fix = "name another folder, or replace it with --force"
        raise ToolkitError(f"contains {earlier[0].name} already", where=str(final), fix=fix)


@contextmanager
def writing_to(final: Path) -> Iterator[None]:
    """Turn system errors about the destination into errors that name it; those about other paths pass unchanged."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        failed = Path(os.fsdecode(error.filename)) if error.filename is not None else final
        is_elsewhere = final.parent not in (failed, *failed.parents) and failed not in final.parents
        if is_elsewhere or number not in (*_DISK_FULL, *_NOT_WRITABLE):
            raise
        fix = "free space there, or name another path" if number in _DISK_FULL else "name a path that you can write to"
        if number == errno.ENAMETOOLONG:
            fix = "choose a shorter name"
        kind = OwnFailureError if number in _DISK_FULL else ToolkitError
        raise kind(f"cannot be written: {os.strerror(number)}", where=str(final), fix=fix) from error
