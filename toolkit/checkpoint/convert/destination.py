"""The destination of an export, which is written next to its final path, synced to disk, and renamed when complete.

`replace` permits overwriting a file of that name, and in a folder the files that an export may have written. Other
files, such as a model's `config.json`, remain. Exports into a checkpoint are rejected.
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
_NAME_CHARACTERS = 40  # temporary names are shortened, because the file name may already have the maximum length


def resolve_destination(named: Path) -> Path:
    """Resolve the links of a path. Raises ToolkitError for a pipe, device, or path in or named like a checkpoint."""
    with writing_to(named):
        if named.exists() and not named.is_file() and not named.is_dir():
            raise ToolkitError("is not a regular file", where=str(named), fix="choose another file")
        try:
            resolved = named.resolve()
        except RuntimeError:
            raise ToolkitError("is a link to itself", where=str(named), fix="choose another path") from None
        refuse_checkpoint(named)
    return resolved


def refuse_checkpoint(final: Path) -> None:
    """Raise a ToolkitError if a path is a checkpoint, committed or not, is inside one, or is named like one."""
    resolved = final.resolve()
    for folder in (final, resolved, *resolved.parents):
        if not _is_checkpoint(folder):
            continue
        if folder in (final, resolved) and not final.exists():
            fix = f"choose another name, such as {final.with_name(final.name.replace('step-', 'export-'))}"
            raise ToolkitError("has a name that is reserved for checkpoints", where=str(final), fix=fix)
        problem = "is a checkpoint" if folder in (final, resolved) else f"is inside the checkpoint {folder.name}"
        raise ToolkitError(problem, where=str(final), fix=f"choose a path outside of {folder}")


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, by its name or manifest; other programs also write a manifest.json."""
    if step_of(folder) is not None or aside_of(folder) is not None:
        return True
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        with manifest.open("rb") as file:
            is_ours = file.read(len(_MANIFEST_PREFIX)) == _MANIFEST_PREFIX
        return is_ours or any(folder.glob("shard-*-of-*.h5"))
    except PermissionError:  # this may be a checkpoint of another user
        return True


@contextmanager
def new_file(final: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `final` when the context ends without an error.

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
    """Yield a temporary folder, whose files move into `final` when the context ends without an error.

    Existing files that match `patterns`, which exports may have written, are replaced. The files `last`, which a reader
    opens first, are removed first and moved last, so that a concurrent reader fails instead of reading a mixture.
    Raises ToolkitError if `final` must not be replaced, and OwnFailureError if the disk is full.
    """
    with writing_to(final):
        _refuse_folder(final, patterns, replace=replace)
        final.parent.mkdir(parents=True, exist_ok=True)
        # Inside `final` if it exists, because it may be a mount point, or its parent may not be writable.
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
        raise ToolkitError("is a folder", where=str(final), fix=f"choose a file, such as {final / 'model.pt'}")
    if final.exists() and not final.is_file():  # it is, for example, a device
        raise ToolkitError("is not a regular file", where=str(final), fix="choose another file")
    if final.exists() and not replace:
        raise ToolkitError("already exists", where=str(final), fix="choose another, or replace this file with --force")


def _refuse_folder(final: Path, patterns: Sequence[str], *, replace: bool) -> None:
    refuse_checkpoint(final)
    if final.exists() and not final.is_dir():
        raise ToolkitError("is a file", where=str(final), fix="choose a folder")
    earlier = _earlier_files(final, patterns)
    if earlier and not replace:
        fix = "choose another folder, or replace this export with --force"
        raise ToolkitError(f"already contains {earlier[0].name}", where=str(final), fix=fix)


@contextmanager
def writing_to(final: Path) -> Iterator[None]:
    """Convert an OSError about the destination to an error that names it; errors about other paths pass unchanged."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        failed = Path(os.fsdecode(error.filename)) if error.filename is not None else final
        is_elsewhere = final.parent not in (failed, *failed.parents) and failed not in final.parents
        if is_elsewhere or number not in (*_DISK_FULL, *_NOT_WRITABLE):
            raise
        fix = "free space there, or choose another path" if number in _DISK_FULL else "choose a writable path"
        if number == errno.ENAMETOOLONG:
            fix = "choose a shorter name"
        kind = OwnFailureError if number in _DISK_FULL else ToolkitError
        raise kind(f"cannot be written: {os.strerror(number)}", where=str(final), fix=fix) from error
