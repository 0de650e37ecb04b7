"""XXH3-128 digests of the 4 MiB blocks of a file. They locate accidental damage, but do not stop an attacker."""

import re
import stat
from dataclasses import dataclass
from pathlib import Path

import xxhash

from toolkit.checkpoint.errors import CorruptCheckpointError

BLOCK_BYTES = 4 * 1024 * 1024
_HEADER = f"toolkit-block-digests 1 xxh3_128 block={BLOCK_BYTES} size="
_HEADER_LINE = re.compile(_HEADER + r"(\d{1,19})")
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class BlockDigests:
    """The digests of one file: `blocks[i]` covers bytes [i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES)."""

    size: int
    blocks: tuple[str, ...]

    @property
    def whole(self) -> str:
        """The digest of the whole file: XXH3-128 over the raw bytes of its block digests, in order."""
        return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(self.blocks)))

    def text(self) -> str:
        """Return the content of a `.digest` file: a header, then one line of 32 hex digits for each block."""
        return "\n".join([f"{_HEADER}{self.size}", *self.blocks, ""])


def size_of_file(path: Path) -> int:
    """Return the size in bytes. Raises CorruptCheckpointError if missing or not regular (a link may lead elsewhere)."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CorruptCheckpointError("is missing", where=str(path)) from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError("is not a regular file", where=str(path))
    return status.st_size


def digests_of_file(path: Path) -> BlockDigests:
    """Read a whole file and digest its blocks."""
    blocks = []
    size = 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb") as file:
        # readinto of a buffered file returns fewer bytes only at the end of the file.
        while count := file.readinto(buffer):
            blocks.append(xxhash.xxh3_128_hexdigest(buffer[:count]))
            size += count
    return BlockDigests(size, tuple(blocks))


def digests_of_text(text: str) -> BlockDigests:
    """Return the digests of a file that contains this string as UTF-8."""
    data = memoryview(text.encode())
    blocks = (data[first : first + BLOCK_BYTES] for first in range(0, len(data), BLOCK_BYTES))
    return BlockDigests(len(data), tuple(map(xxhash.xxh3_128_hexdigest, blocks)))


def read_digests(path: Path) -> BlockDigests:
    """Read a `.digest` file; raises CorruptCheckpointError if its format or its number of blocks is wrong."""
    lines = path.read_text(encoding="ascii", errors="replace").split("\n")
    header, blocks = _HEADER_LINE.fullmatch(lines[0]), lines[1:-1]
    if header is None or lines[-1] or not all(map(_DIGEST.fullmatch, blocks)):
        raise CorruptCheckpointError("is not a valid digest file", where=str(path))
    size = int(header.group(1))
    if len(blocks) != -(-size // BLOCK_BYTES):
        raise CorruptCheckpointError(f"has {len(blocks)} digests, the wrong number for {size} bytes", where=str(path))
    return BlockDigests(size, tuple(blocks))
