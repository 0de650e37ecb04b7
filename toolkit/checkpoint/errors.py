"""The one error that means "this checkpoint is damaged", apart from mistakes of its user and troubles of a host."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import CheckFailedError, OwnFailureError

_NOT_ALLOWED = (errno.EACCES, errno.EPERM)


class CorruptCheckpointError(CheckFailedError):
    """A committed checkpoint is incomplete or its bytes are not those that were saved.

    Loading falls back to an older checkpoint on this error, and on no other.
    """


def host_cannot_read(error: OSError, path: Path, what: str = "cannot be read") -> OwnFailureError:
    """The system did not let this host, or this user, read: that says nothing about the checkpoint."""
    number = error.errno or errno.EIO
    if number in _NOT_ALLOWED:
        fix = "read it as its owner; `paths.access` of the site says who may read a run"
    else:
        fix = "mend or exclude that host; the checkpoint was left as it is"
    return OwnFailureError(
        f"{what} on {socket.gethostname()}: {errno.errorcode.get(number, number)}: {os.strerror(number)}",
        where=str(error.filename or path),
        fix=fix,
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While something below `path` is read, the system's refusals name it; they may name no file themselves.

    Raises:
        CorruptCheckpointError: the disk does not give some bytes.
        OwnFailureError: this host, or this user, cannot read.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise host_cannot_read(error, path) from None
        raise CorruptCheckpointError(
            f"cannot be read: {os.strerror(errno.EIO)}", where=str(error.filename or path)
        ) from None
