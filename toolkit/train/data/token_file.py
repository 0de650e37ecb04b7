"""Memory-mapped token files: a header of 64 bytes, then the tokens, little-endian.

    offset  bytes  what
    0       8      TKTOKEN1
    8       4      bytes of a token: 2 (uint16) or 4 (uint32)
    12      4      size of the vocabulary, 0 if unknown
    16      8      number of tokens
    24      8      number of texts that were packed
    32      16     xxh3_128 of all tokens' bytes, as `xxhsum -H2` prints it
    48      16     zeros

All numbers are little-endian and unsigned. A file without this header is raw: the caller must pass its dtype.
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
TYPES: dict[str, int] = {"uint16": 2, "uint32": 4}  # bytes per token, by type name
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
    """Read the header of a token file; return None if it has none (raw tokens, or another kind of file).

    Raises:
        NotFoundError: the file does not exist.
        ToolkitError: the header contradicts the file's size, or is of another version.
    """
    check_readable(path, "pass a token file, or create one: toolkit data pack FILES -o OUT")
    size = path.stat().st_size
    with path.open("rb") as stream:
        data = stream.read(HEADER_BYTES)
    if not data.startswith(MAGIC[:7]):
        return None
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise _damaged(path, "the header is truncated or has another version")
    _, width, vocabulary, tokens, texts, digest = _HEADER.unpack(data)
    dtype = next((name for name, bytes_ in TYPES.items() if bytes_ == width), None)
    if dtype is None:
        raise _damaged(path, f"expected 2 or 4 bytes per token in the header, got {width}")
    if size != HEADER_BYTES + tokens * width:
        expected = HEADER_BYTES + tokens * width
        raise _damaged(path, f"expected {expected:,} bytes for {tokens:,} tokens, got {size:,}")
    return TokenHeader(dtype, vocabulary, tokens, texts, digest)


def _damaged(path: Path, what: str) -> ToolkitError:
    return ToolkitError(what, where=str(path), fix="pack the text again: toolkit data pack FILES -o OUT")


def map_tokens(path: Path, dtype: str | None = None) -> NDArray[Any]:
    """Memory-map the tokens of a file without reading them; shape (tokens,), type uint16 or uint32.

    Args:
        dtype: the type of a raw file; a header must state the same type.

    Raises:
        ToolkitError: there is neither a header nor a `dtype`, they differ, or the file ends within a token.
    """
    if dtype is not None and dtype not in TYPES:
        raise ToolkitError(f"unsupported token type {dtype!r}", where=str(path), fix='pass dtype="uint16" or "uint32"')
    header = read_header(path)
    if header is None and dtype is None:
        raise ToolkitError(
            "the file does not start with a token file header",
            where=str(path),
            fix='pass dtype="uint16" or "uint32" for raw tokens, or create one: toolkit data pack FILES -o OUT',
        )
    if header is not None and dtype not in (None, header.dtype):
        raise ToolkitError(f"expected {dtype} tokens, got {header.dtype}", where=str(path), fix="omit dtype")
    found = header.dtype if header else dtype
    assert found is not None
    offset = HEADER_BYTES if header else 0
    size = path.stat().st_size - offset
    if size % TYPES[found]:
        raise ToolkitError(
            f"expected a whole number of {found} tokens, got {size:,} bytes",
            where=str(path),
            fix="pass the dtype of the tokens in this file",
        )
    if size == 0:
        return np.empty(0, np.dtype(found).newbyteorder("<"))
    # A plain array, because slices of a memmap are slower.
    return np.asarray(np.memmap(path, np.dtype(found).newbyteorder("<"), "r", offset))
