"""Creates HDF5 files, in memory or on a disk that may fill up.

HDF5 2.0 may crash (SIGSEGV in H5Fclose) if the last flush of a file fails, and its errors do not name the cause. So it
writes through a Python file object that hides errors from HDF5 and raises them after HDF5 has closed the file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py

from toolkit.rundir.files import mode_of_files_in

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# HDF5 1.10, the oldest version with virtual datasets, can read the files.
_LIBRARY_VERSIONS = ("v110", "v110")


@contextmanager
def new_hdf5_file(path: Path, **properties: Any) -> Iterator[h5py.File]:
    """Create a file with the permissions of its folder, fully written when the context ends. Raises OSError if a write failed."""
    with _Stream(path, "x+") as stream:
        os.fchmod(stream.fileno(), mode_of_files_in(path.parent))  # the umask must not decide who can read
        with _hdf5_in(stream, str(path), properties) as file:
            yield file


@contextmanager
def hdf5_in_memory(**properties: Any) -> Iterator[tuple[h5py.File, int]]:
    """Create a sparse file in memory. Yields it with its descriptor; close the file before reading from the descriptor.

    Raises OSError if a write failed, for example due to `ulimit -f`.
    """
    with _Stream(os.memfd_create("hdf5"), "r+") as stream, _hdf5_in(stream, "memory", properties) as file:
        yield file, stream.fileno()


@contextmanager
def _hdf5_in(stream: _Stream, name: str, properties: dict[str, Any]) -> Iterator[h5py.File]:
    try:
        with h5py.File(stream, "w", libver=_LIBRARY_VERSIONS, **properties) as file:
            yield file
    finally:
        if stream.failure is not None:
            # Replaces HDF5's own error, which does not contain the cause.
            raise OSError(stream.failure.errno, stream.failure.strerror, name)


class _Stream(io.FileIO):
    """A file that stores its first error in `failure` and writes nothing more after it."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`, possibly in several system calls, because each writes at most 2 GiB."""
        rest = memoryview(data)
        size = len(rest)
        try:
            while self.failure is None and rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0
