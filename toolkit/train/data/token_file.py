"""Tokens in a file that is mapped into memory: a header of 64 bytes, then the tokens, little-endian.

    offset  bytes  what
    0       8      TKTOKEN1
    8       4      bytes of a token: 2 (uint16) or 4 (uint32)
    12      4      size of the vocabulary, 0 where it is not known
    16      8      number of tokens
    24      8      number of texts that were packed
    32      16     xxh3_128 of all tokens' bytes, as `xxhsum -H2` prints it
    48      16     zeros

All numbers are little-endian and unsigned. A file without the header is raw: its type must be given.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.train.data.pieces import check_readable

__all__ = ["read_header"]

MAGIC = b"TKTOKEN1"
HEADER_BYTES = 64
TYPES: dict[str, int] = {"uint16": 2, "uint32": 4}  # name: bytes of a token
_HEADER = struct.Struct("<8sIIQQ16s16x")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True)
class TokenHeader:
    """The header of a token file. `digest` is 16 bytes; `dtype` is "uint16" or "uint32"."""

    dtype: str
    vocabulary: int
    tokens: int
    texts: int
    digest: bytes

    def to_bytes(self) -> bytes:
        return _HEADER.pack(MAGIC, TYPES[self.dtype], self.vocabulary, self.tokens, self.texts, self.digest)


def read_header(path: Path) -> TokenHeader | None:
    """Read the header of a token file; None for a file without one: raw tokens, or something else.

    Raises:
        NotFoundError: the file does not exist.
        ToolkitError: the header contradicts the file's size, or is of another version.
    """
    check_readable(path, "name a token file, or create one: toolkit data pack FILES -o OUT")
    size = path.stat().st_size
    with path.open("rb") as stream:
        data = stream.read(HEADER_BYTES)
    if not data.startswith(MAGIC[:7]):
        return None
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise _damaged(path, "its header is truncated or of another version")
    _, width, vocabulary, tokens, texts, digest = _HEADER.unpack(data)
    dtype = next((name for name, bytes_ in TYPES.items() if bytes_ == width), None)
    if dtype is None:
        raise _damaged(path, f"its header states tokens of {width} bytes")
    if size != HEADER_BYTES + tokens * width:
        raise _damaged(path, f"it has {size:,} bytes, and its {tokens:,} tokens need {HEADER_BYTES + tokens * width:,}")
    return TokenHeader(dtype, vocabulary, tokens, texts, digest)


def _damaged(path: Path, what: str) -> ToolkitError:
    return ToolkitError(what, where=str(path), fix="pack the text again: toolkit data pack FILES -o OUT")


def map_tokens(path: Path, dtype: str | None = None) -> NDArray[Any]:
    """Map the tokens of a file into memory without reading them; shape (tokens,), type uint16 or uint32.

    Args:
        dtype: the type of a raw file; a header overrides it.

    Raises:
        ToolkitError: there is neither, or the bytes are not a whole number of tokens.
    """
    if dtype is not None and dtype not in TYPES:
        raise ToolkitError(f"{dtype!r} is not a token type", where=str(path), fix='pass dtype="uint16" or "uint32"')
    header = read_header(path)
    if header is None and dtype is None:
        raise ToolkitError(
            "has no header of a token file",
            where=str(path),
            fix='pass dtype="uint16" or "uint32" for raw tokens, or create one: toolkit data pack FILES -o OUT',
        )
    if header is not None and dtype not in (None, header.dtype):
        raise ToolkitError(f"holds {header.dtype}, not {dtype}", where=str(path), fix="omit dtype")
    found = header.dtype if header else dtype
    assert found is not None
    offset = HEADER_BYTES if header else 0
    size = path.stat().st_size - offset
    if size % TYPES[found]:
        raise ToolkitError(
            f"{size:,} bytes are not a whole number of {found}", where=str(path), fix="pass the type of its tokens"
        )
    if size == 0:
        return np.empty(0, np.dtype(found).newbyteorder("<"))
    # A plain array, because slices of a memmap are slower.
    return np.asarray(np.memmap(path, np.dtype(found).newbyteorder("<"), "r", offset))
