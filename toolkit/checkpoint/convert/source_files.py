"""A file that somebody else made, before it is believed: is it there, may it be read, and is it the file itself?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError

FETCH_AGAIN = "copy or fetch the whole file again"
_GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BEGINNING_BYTES = 64
_DAMAGED_MEDIUM = "read it on another host, or fetch the file again"


def beginning_of(path: Path, what: str) -> tuple[int, bytes]:
    """The size of a file, and its first 64 bytes. Links are followed: a snapshot in Hugging Face's cache is made of them.

    Args:
        what: what it should be, such as "a safetensors file", for the fix.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: it is no regular file, empty, only a pointer to the file, or this user may not read it.
        OwnFailureError: the system does not give its bytes.
    """
    with reading_source(path):
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ToolkitError("is a folder", where=str(path), fix=f"name {what} in it")
        if not stat.S_ISREG(found.st_mode):
            raise ToolkitError("is no regular file", where=str(path), fix=f"name {what}")
        with path.open("rb") as file:
            start = file.read(_BEGINNING_BYTES)
    if not start:
        raise ToolkitError("is empty", where=str(path), fix=FETCH_AGAIN)
    if start.startswith(_GIT_LFS_POINTER):
        raise ToolkitError(
            "is a pointer of Git LFS, and not the file itself", where=str(path), fix="`git lfs pull` in its folder"
        )
    return found.st_size, start


@contextmanager
def reading_source(path: Path) -> Iterator[None]:
    """While a source is read, what the system refuses is said of the file that it names, or of `path`.

    Raises:
        NotFoundError: it is not there.
        ToolkitError: this user may not read it.
        OwnFailureError: the system does not give its bytes.
    """
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else str(path)
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotFoundError("is not there", where=where, fix="name a file or a folder that is there") from None
        if isinstance(error, PermissionError):
            fix = "ask its owner for the right to read it (chmod), or name a copy"
            raise ToolkitError(f"cannot be read: {error.strerror}", where=where, fix=fix) from None
        raise OwnFailureError(f"cannot be read: {error.strerror or error}", where=where, fix=_DAMAGED_MEDIUM) from None
