"""Checks of a file from elsewhere before its contents are used: existence, access, format, and memory."""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError
from toolkit.world.health import memories

FETCH_AGAIN = "copy or fetch the whole file again"
LENGTH = struct.Struct("<Q")  # of the header that follows, in a safetensors file
ZIP = b"PK\x03\x04"  # of torch.save
ROOT = Path("/")  # where proc and sys are
_BEFORE_TORCH_1_6 = bytes.fromhex("6cfc9c46f9206aa85019")  # torch's magic number as a pickle contains it
_GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PREFIX_BYTES = 64
_DAMAGED_MEDIUM = "read it on another host, or fetch the file again"


def read_prefix(path: Path, expected: str) -> tuple[int, bytes]:
    """The size of a file and its first 64 bytes. Follows links: a snapshot in Hugging Face's cache consists of them.

    `expected` describes the file in the fix: "a safetensors file". Raises ToolkitError if it is not a regular file, is
    empty or a Git LFS pointer, and the errors of `reading_source`.
    """
    with reading_source(path):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ToolkitError("is a folder", where=str(path), fix=f"name {expected} in it")
        if not stat.S_ISREG(status.st_mode):
            raise ToolkitError("is not a regular file", where=str(path), fix=f"name {expected}")
        with path.open("rb") as file:
            prefix = file.read(_PREFIX_BYTES)
    if not prefix:
        raise ToolkitError("is empty", where=str(path), fix=FETCH_AGAIN)
    if prefix.startswith(_GIT_LFS_POINTER):
        fix = "`git lfs pull` in its folder"
        raise ToolkitError("is a pointer of Git LFS, not the file itself", where=str(path), fix=fix)
    return status.st_size, prefix


def format_from_prefix(size: int, prefix: bytes) -> str | None:
    """The format of a file of `size` bytes with these first bytes; None if they do not show it."""
    if prefix.startswith(ZIP) or _BEFORE_TORCH_1_6 in prefix:
        return "torch"
    if prefix[LENGTH.size : LENGTH.size + 1] == b"{" and LENGTH.unpack_from(prefix)[0] <= size - LENGTH.size:
        return "safetensors"
    return None


@contextmanager
def reading_source(path: Path) -> Iterator[None]:
    """Turn system errors while a source is read into errors that name the file, or `path` if the system names none.

    Raises NotFoundError for a missing file, ToolkitError if this user cannot read it, and OwnFailureError otherwise.
    """
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else str(path)
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotFoundError("not found", where=where, fix="name an existing file or folder") from None
        if isinstance(error, PermissionError):
            fix = "ask its owner for the right to read it (chmod), or name a copy"
            raise ToolkitError(f"cannot be read: {error.strerror}", where=where, fix=fix) from None
        raise OwnFailureError(f"cannot be read: {error.strerror or error}", where=where, fix=_DAMAGED_MEDIUM) from None


def refuse_more_than_is_free(needed_bytes: int, user: str, *, where: str, fix: str) -> None:
    """Raise an OwnFailureError if the node, or a cgroup limit of this process, has less free memory than needed.

    Otherwise the kernel would kill the process without an explanation. `user` is what needs the memory ("torch.save"),
    `fix` the formats that need less.
    """
    for owner, free_bytes, _ in memories(ROOT):
        if needed_bytes > free_bytes:
            raise OwnFailureError(
                f"{user} needs {_gigabytes(needed_bytes)} of memory, but {owner} has {_gigabytes(free_bytes)} free",
                where=where,
                fix=f"export with {fix}, or on a host with more memory",
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
