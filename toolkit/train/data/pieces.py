"""Text files in pieces, cut at line ends: the same pieces for any number of readers."""

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
        raise ToolkitError(f"cannot read it: {error.strerror}", where=str(path), fix=fix) from error
    if not found:
        if path.exists():
            raise ToolkitError("is not a file", where=str(path), fix=fix)
        raise NotFoundError("file not found", where=str(path), fix=fix)
    if not os.access(path, os.R_OK):
        raise ToolkitError("may not be read by this user", where=str(path), fix=f"chmod +r {path}")


PIECE_BYTES = 4 << 20
_LOOK_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """The bytes [begin, end) of a file; `last` if the file ends there."""

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
            ToolkitError: the file has become shorter.
        """
        with self.path.open("rb") as stream:
            stream.seek(self.begin)
            data = stream.read(self.end - self.begin)
        if len(data) != self.end - self.begin:
            raise ToolkitError("changes while it is read", where=str(self.path), fix="start when the file is complete")
        return data


def pieces_of(paths: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yield the files in order, each in pieces of about `piece_bytes`.

    A cut follows a line end, where tokenizers cut as well; in a line of more than `piece_bytes` it is between two
    characters of UTF-8.
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
    """Return the bytes of a readable file.

    Raises:
        NotFoundError: it does not exist.
        ToolkitError: it is a folder, or not readable.
    """
    check_readable(path, "name text files")
    return path.stat().st_size


def _cut(stream: BinaryIO, earliest: int, latest: int) -> int:
    """Return the place after the first line end from `earliest` on, at most `latest`."""
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
    # Bytes 10xxxxxx continue a character.
    tail = stream.read(4)
    back = next((number for number in range(3, -1, -1) if tail[number] & 0xC0 != 0x80), 3)
    return latest - 4 + back if latest - 4 + back > earliest else latest
