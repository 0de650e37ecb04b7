"""Split text files into pieces at line ends, in the same way for any number of readers."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["size_of"]


def check_readable(path: Path, fix: str) -> None:
    """Reject a path that is not a readable file; reading a pipe would never end.

    Raises:
        NotFoundError: it does not exist.
        ToolkitError: it is not a file, or this user may not read it.
    """
    try:
        found = path.is_file()
    except OSError as error:
        raise ToolkitError(f"cannot read the file: {error.strerror}", where=str(path), fix=fix) from error
    if not found:
        if path.exists():
            raise ToolkitError("expected a regular file", where=str(path), fix=fix)
        raise NotFoundError("file not found", where=str(path), fix=fix)
    if not os.access(path, os.R_OK):
        raise ToolkitError("this user has no read permission", where=str(path), fix=f"chmod +r {path}")


PIECE_BYTES = 4 << 20
_LOOK_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """The bytes [begin, end) of a file; `last` is True if the file ends there."""

    path: Path
    begin: int
    end: int
    last: bool

    @property
    def where(self) -> str:
        return f"{self.path} (bytes {self.begin:,} to {self.end:,})"

    def read(self) -> bytes:
        """Return the piece's bytes.

        Raises:
            ToolkitError: the file has been truncated.
        """
        with self.path.open("rb") as stream:
            stream.seek(self.begin)
            data = stream.read(self.end - self.begin)
        if len(data) != self.end - self.begin:
            raise ToolkitError(
                "the file changed during the read", where=str(self.path), fix="retry when the file is complete"
            )
        return data


def pieces_of(paths: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yield the files in order, each in pieces of about `piece_bytes`.

    A piece ends after a line end, where tokenizers split as well; a line longer than `piece_bytes` is split between two
    UTF-8 characters.
    """
    for path in paths:
        size = size_of(path)
        with path.open("rb") as stream:
            begin = 0
            while True:
                end = (
                    size
                    if size - begin <= piece_bytes
                    else _cut(stream, begin + piece_bytes, min(size, begin + 2 * piece_bytes))
                )
                yield Piece(path, begin, end, last=end == size)
                if end == size:
                    break
                begin = end


def size_of(path: Path) -> int:
    """Return the size of a readable file in bytes.

    Raises:
        NotFoundError: it does not exist.
        ToolkitError: it is a folder, or not readable.
    """
    check_readable(path, "pass text files")
    return path.stat().st_size


def _cut(stream: BinaryIO, earliest: int, latest: int) -> int:
    """Return the offset after the first line end at or after `earliest`, but at most `latest`."""
    stream.seek(earliest)
    place = earliest
    while place < latest:
        block = stream.read(min(_LOOK_BYTES, latest - place))
        if not block:
            break
        if (found := block.find(b"\n")) >= 0:
            return place + found + 1
        place += len(block)
    stream.seek(latest - 4)
    # Do not split a UTF-8 character: bytes 10xxxxxx continue one.
    tail = stream.read(4)
    back = next((number for number in range(3, -1, -1) if tail[number] & 0xC0 != 0x80), 3)
    return latest - 4 + back if latest - 4 + back > earliest else latest
