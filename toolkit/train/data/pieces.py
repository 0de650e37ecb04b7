"""Text files in pieces, cut at line ends: the same pieces for every reader and any number of readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toolkit.errors import ToolkitError
from toolkit.train.data.readable import check_readable

PIECE_BYTES = 4 << 20
_LOOK_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """The bytes [begin, end) of a file; `last` where the file ends with it."""

    path: Path
    begin: int
    end: int
    last: bool

    @property
    def where(self) -> str:
        return f"{self.path} (bytes {self.begin:,} to {self.end:,})"

    def read(self) -> bytes:
        """The piece's bytes.

        Raises:
            ToolkitError: the file has become shorter.
        """
        with self.path.open("rb") as stream:
            stream.seek(self.begin)
            data = stream.read(self.end - self.begin)
        if len(data) != self.end - self.begin:
            raise ToolkitError("changes while it is read", where=str(self.path), fix="begin when it is complete")
        return data


def pieces_of(paths: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The files, each in pieces of about `piece_bytes`, in order.

    A cut follows a line's end, where tokenizers cut as well, or, in a line of more than `piece_bytes`, between
    two letters of UTF-8.
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
    """Bytes of a file that can be read.

    Raises:
        NotFoundError: there is none.
        ToolkitError: it is a folder, or may not be read.
    """
    check_readable(path, "name text files")
    return path.stat().st_size


def _cut(stream: BinaryIO, earliest: int, latest: int) -> int:
    """Behind the first line end from `earliest` on, and by `latest` at most."""
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
    # Bytes 10xxxxxx go on with a letter that began before them.
    tail = stream.read(4)
    back = next((number for number in range(3, -1, -1) if tail[number] & 0xC0 != 0x80), 3)
    return latest - 4 + back if latest - 4 + back > earliest else latest
