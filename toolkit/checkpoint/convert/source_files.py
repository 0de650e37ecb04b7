"""Checks a foreign file before its contents are used: existence, access, format, and memory to read it."""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError
from toolkit.metrics.memory_limits import memories

FETCH_AGAIN = "copy or fetch the whole file again"
LENGTH = struct.Struct("<Q")  # the length of the header of a safetensors file, which follows this field
ZIP = b"PK\x03\x04"  # the first bytes of a zip file, as torch.save writes it
ROOT = Path("/")  # the parent folder of proc and sys
_BEFORE_TORCH_1_6 = bytes.fromhex("6cfc9c46f9206aa85019")  # torch's magic number as a pickle contains it
_GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PREFIX_BYTES = 64
_DAMAGED_MEDIUM = "read the file on another host, or fetch it again"


def read_prefix(path: Path, expected: str) -> tuple[int, bytes]:
    """Return the size and first 64 bytes of a file. Follows links, as snapshots in Hugging Face's cache are links.

    `expected` describes the file in the fix: "a safetensors file". Raises ToolkitError if it is not a regular file, is
    empty or is a Git LFS pointer, and the errors of `reading_source`.
    """
    with reading_source(path):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ToolkitError("is a folder", where=str(path), fix=f"pass {expected} in this folder")
        if not stat.S_ISREG(status.st_mode):
            raise ToolkitError("is not a regular file", where=str(path), fix=f"pass {expected}")
        with path.open("rb") as file:
            prefix = file.read(_PREFIX_BYTES)
    if not prefix:
        raise ToolkitError("is empty", where=str(path), fix=FETCH_AGAIN)
    if prefix.startswith(_GIT_LFS_POINTER):
        fix = "run `git lfs pull` in its folder"
        raise ToolkitError("is a Git LFS pointer, not the file itself", where=str(path), fix=fix)
    return status.st_size, prefix


def format_from_prefix(size: int, prefix: bytes) -> str | None:
    """Return the format of a file of `size` bytes according to its first bytes, or None if they do not identify it."""
    if prefix.startswith(ZIP) or _BEFORE_TORCH_1_6 in prefix:
        return "torch"
    if prefix[LENGTH.size : LENGTH.size + 1] == b"{" and LENGTH.unpack_from(prefix)[0] <= size - LENGTH.size:
        return "safetensors"
    return None


@contextmanager
def reading_source(path: Path) -> Iterator[None]:
    """Convert an OSError while reading a source to an error that names the file, or `path` if the OSError names none.

    Raises NotFoundError for a missing file, ToolkitError if this user cannot read it, and OwnFailureError otherwise.
    """
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else str(path)
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotFoundError("not found", where=where, fix="pass an existing file or folder") from None
        if isinstance(error, PermissionError):
            fix = "ask its owner for read permission (chmod), or pass a copy"
            raise ToolkitError(f"cannot be read: {error.strerror}", where=where, fix=fix) from None
        raise OwnFailureError(f"cannot be read: {error.strerror or error}", where=where, fix=_DAMAGED_MEDIUM) from None


def refuse_more_than_is_free(needed_bytes: int, user: str, *, where: str, fix: str) -> None:
    """Raise an OwnFailureError if the node, or a cgroup limit of this process, has less free memory than needed.

    Otherwise the kernel would kill the process without an explanation. `user` names what needs the memory, such as
    "torch.save"; `fix` names export options that need less.
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
