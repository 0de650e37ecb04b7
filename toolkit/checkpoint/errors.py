"""The errors that saves and loads raise: for damage, for hosts that cannot read a file, and for failures of ranks."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.comm.rank_failure import RankFailure, add_failure_kind
from toolkit.errors import CheckFailedError, OwnFailureError, ToolkitError

__all__ = ["CorruptCheckpointError", "host_cannot_read"]

_NOT_ALLOWED = (errno.EACCES, errno.EPERM)
_PRUNE = "free space there, for example with `toolkit ckpt prune RUN --keep-last 1`"
_OPEN = "make that folder writable for the user of this run"
_FIXES = {
    errno.ENOSPC: _PRUNE, errno.EDQUOT: _PRUNE, errno.EROFS: _OPEN, errno.EACCES: _OPEN, errno.EPERM: _OPEN,
}  # fmt: skip


class CorruptCheckpointError(CheckFailedError):
    """A committed checkpoint is incomplete or differs from what was saved. Only this error makes a load fall back."""


# If ranks raise different errors, this one takes precedence, so that the load falls back to an older checkpoint.
add_failure_kind("corrupt", CorruptCheckpointError, comes_first=True)


def host_cannot_read(error: OSError, path: Path, what: str = "cannot be read") -> OwnFailureError:
    """Return the error for a read that failed on this host or for this user; the checkpoint itself may be undamaged."""
    number = error.errno or errno.EIO
    if number in _NOT_ALLOWED:
        fix = "read the file as its owner; `paths.access` in the site file sets who may read a run"
    else:
        fix = "repair or exclude that host; the checkpoint was not changed"
    return OwnFailureError(
        f"{what} on {socket.gethostname()}: {errno.errorcode.get(number, number)}: {os.strerror(number)}",
        where=str(error.filename or path),
        fix=fix,
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an OSError while reading below `path` to an error that names the file, or `path` if no file is known.

    Raises CorruptCheckpointError for an I/O error of the disk (EIO), and OwnFailureError otherwise.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise host_cannot_read(error, path) from None
        raise CorruptCheckpointError(
            f"cannot be read: {os.strerror(errno.EIO)}", where=str(error.filename or path)
        ) from None


def save_error(directory: Path, step: int, last_good: str, failure: RankFailure) -> ToolkitError:
    """Return the error for a failed save of `step`; `last_good` describes the newest remaining checkpoint."""
    error = failure.error
    message = f"checkpoint of step {step} was not saved: rank {failure.rank}: {_reason(error)}; {last_good}"
    if isinstance(error, ToolkitError):
        return _class_of(error)(message, where=str(directory), fix=error.fix)
    number = error.errno if isinstance(error, OSError) else None
    return OwnFailureError(message, where=str(directory), fix=_FIXES.get(number or 0, ""))


def load_error(folder: Path, failure: RankFailure) -> ToolkitError:
    """Return the error for a failed load; a `CorruptCheckpointError` is returned unchanged."""
    error = failure.error
    if isinstance(error, CorruptCheckpointError):
        return error
    if isinstance(error, ToolkitError):
        where = error.where or str(folder)
        if not where.startswith(str(folder)):
            where = f"{folder}: {where}"
        return _class_of(error)(error.message, where=where, fix=error.fix)
    return OwnFailureError(f"could not be loaded: rank {failure.rank}: {_reason(error)}", where=str(folder))


def _class_of(error: ToolkitError) -> type[ToolkitError]:
    """Return `OwnFailureError` for a machine failure, which may not recur on a retry; else `ToolkitError`."""
    return OwnFailureError if isinstance(error, OwnFailureError) else ToolkitError


def _reason(error: Exception) -> str:
    """Return the cause in one line."""
    if isinstance(error, ToolkitError):
        return f"{error.where}: {error.message}" if error.where else error.message
    if isinstance(error, OSError) and error.errno:
        return f"{os.strerror(error.errno)}" + (f": {error.filename}" if error.filename else "")
    text = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
