"""The line index of a file: built once, stored next to the file, and rebuilt when the file changes.

The index is a .npy file of int64: version, size of the text in bytes, its mtime in ns, the number of records, whether
line numbers follow, then the offset of each record, then, if there are empty lines, the line number of each record.
Empty lines are not records.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.rundir.files import is_unwritable, mode_of_files_in
from toolkit.train.data.pieces import check_readable

__all__ = ["line_index"]

_VERSION = 1
_HEAD = 5  # count of the numbers that precede the offsets
_BLOCK_BYTES = 1 << 24
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_COMPRESSED = {b"\x1f\x8b": ("gzip", "gunzip -k"), b"BZh": ("bzip2", "bunzip2 -k"), b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dk"), b"\xfd7zXZ": ("xz", "unxz -k")}  # fmt: skip


@dataclass(frozen=True)
class LineIndex:
    """The records of a file: `starts` are their byte offsets, `numbers` their line numbers; `size` is the file size."""

    starts: NDArray[np.int64]
    numbers: NDArray[np.int64] | None
    size: int

    def span(self, record: int) -> tuple[int, int]:
        """Return the start and end of a record, including empty lines after it."""
        end = self.starts[record + 1] if record + 1 < len(self.starts) else self.size
        return int(self.starts[record]), int(end)

    def line(self, record: int) -> int:
        """Return the line number of a record, from 1."""
        return int(self.numbers[record]) if self.numbers is not None else record + 1


def line_index(path: Path, cache: Path | None = None) -> LineIndex:
    """Return the line index of a file; build and store it unless the stored one is up to date.

    Args:
        cache: the folder for indexes. None means the folder of the file, or `~/.cache/toolkit/lines` if that is not
            writable.

    Raises:
        NotFoundError: the file does not exist.
        ToolkitError: the file is compressed, or changes while it is read.
    """
    stamp = _stamp(path)
    places = _places(path, cache)
    for place in places:
        if (found := _read(place, stamp)) is not None:
            return found
    _refuse_compressed(path)
    starts, numbers = _build(path)
    if _stamp(path) != stamp:
        raise ToolkitError("the file changed during the read", where=str(path), fix="retry when the file is complete")
    head = np.array([_VERSION, *stamp, len(starts), numbers is not None], np.int64)
    whole = np.concatenate([head, starts] if numbers is None else [head, starts, numbers])
    if not any(_write(place, whole) for place in places):
        raise ToolkitError(
            "cannot write the line index to any of these paths",
            where=", ".join(map(str, places)),
            fix="free space, or set data.index_folder to a writable folder",
        )
    return LineIndex(starts, numbers, stamp[0])


def index_path(path: Path) -> Path:
    """Return the index path in the folder of a file; the index is stored there if that folder is writable."""
    return path.with_name(f".{path.name}.lines.npy")


def _places(path: Path, cache: Path | None) -> list[Path]:
    # Files in different folders may have the same name, so the cache name contains a hash of the path.
    name = f"{path.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))}.npy"
    if cache is not None:
        return [cache / name]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [index_path(path), home / "toolkit" / "lines" / name]


def _stamp(path: Path) -> tuple[int, int]:
    check_readable(path, "pass a file that every node can read")
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _refuse_compressed(path: Path) -> None:
    with path.open("rb") as stream:
        begin = stream.read(8)
    for magic, (kind, command) in _COMPRESSED.items():
        if begin.startswith(magic):
            raise ToolkitError(
                f"expected plain text, got a compressed file ({kind}), whose lines cannot be read individually",
                where=str(path),
                fix=f"run {command} {path}, and pass the uncompressed file",
            )


def _read(place: Path, stamp: tuple[int, int]) -> LineIndex | None:
    """Return the index at this path, or None if it is missing, damaged or out of date."""
    try:
        whole: NDArray[Any] = np.load(place, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # the index is missing or damaged
        return None
    if whole.dtype != np.int64 or whole.ndim != 1 or len(whole) < _HEAD or tuple(whole[:3]) != (_VERSION, *stamp):
        return None
    records, numbered = int(whole[3]), bool(whole[4])
    if len(whole) != _HEAD + records * (2 if numbered else 1):
        return None
    plain = np.asarray(whole)
    numbers = plain[_HEAD + records :] if numbered else None
    return LineIndex(plain[_HEAD : _HEAD + records], numbers, stamp[0])


def _build(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the offsets of the non-empty lines, and their line numbers if there are empty lines."""
    ends: list[NDArray[np.int64]] = []
    offset, last = 0, _NEWLINE
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE) + offset)
            offset, last = offset + len(block), block[-1]
    end = np.concatenate([*ends, np.array([offset] if last != _NEWLINE else [], np.int64)])
    start = np.concatenate([np.zeros(1, np.int64), end[:-1] + 1])[: len(end)]
    length = end - start
    empty = length == 0
    if (short := np.flatnonzero(length == 1)).size:
        with path.open("rb") as stream:
            for line in short.tolist():
                empty[line] = os.pread(stream.fileno(), 1, int(start[line])) == b"\r"
    if not empty.any():
        return start, None
    return start[~empty], np.flatnonzero(~empty) + 1


def _write(place: Path, whole: NDArray[np.int64]) -> bool:
    """Write the index under a temporary name and rename it; return False if the folder is not writable."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Ranks on several hosts may write the same index at once, so the name must be unique across hosts.
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f"{place.name}.", suffix=".tmp")
    except OSError as error:
        if is_unwritable(error) or isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError):
            return False
        raise
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode_of_files_in(place.parent))
            np.save(stream, whole, allow_pickle=False)
        temporary.replace(place)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if is_unwritable(error):
            return False
        raise
    return True
