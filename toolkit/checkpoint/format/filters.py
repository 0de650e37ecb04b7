"""Compresses chunks as HDF5's own filters would, but in parallel threads, and decompresses them without HDF5.

The shuffle filter first groups bytes of equal significance, because exponents are similar and mantissas are not.
"""

import zlib
from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np
from h5py import h5p, h5z

from toolkit.errors import ToolkitError

__all__ = ["check_compression"]

Compression = Literal["none", "gzip", "zstd"]
# The filters of a compressed tensor, in the order in which they are applied.
FILTERS: dict[Compression, tuple[str, ...]] = {"gzip": ("shuffle", "deflate"), "zstd": ("shuffle", "zstd")}
# The numbers that HDF5 assigns to filters.
FILTER_NUMBERS = {"deflate": 1, "shuffle": 2, "zstd": 32015}
_LEVEL = 1  # higher levels take several times as long, and shrink trained weights by only a few percent more


class DecompressionError(ValueError):
    """The bytes do not decompress to a chunk of the expected size."""


def check_compression(kind: str) -> None:
    """Raise a ToolkitError for a compression that is unknown, or whose library is missing."""
    if kind not in ("none", *FILTERS):
        raise ToolkitError(f"{kind!r} is not a valid compression", fix=f"choose one of: none, {', '.join(FILTERS)}")
    if kind == "zstd":
        _zstandard()
        _hdf5_plugins()


def compress(data: memoryview, chunk_bytes: int, element_bytes: int, kind: Compression) -> bytes:
    """Compress a chunk, after padding `data` with zeros to the chunk size."""
    chunk = np.frombuffer(data, np.uint8)
    if len(chunk) < chunk_bytes:
        chunk = np.concatenate([chunk, np.zeros(chunk_bytes - len(chunk), np.uint8)])
    shuffled = np.ascontiguousarray(chunk.reshape(-1, element_bytes).T)
    if kind == "gzip":
        return zlib.compress(shuffled.data, _LEVEL)
    # HDF5's filter requires the content size in the zstd frame.
    stored: bytes = _zstandard().ZstdCompressor(level=_LEVEL, write_content_size=True).compress(shuffled.data)
    return stored


def decompress(stored: memoryview, chunk_bytes: int, element_bytes: int, filters: tuple[str, ...]) -> np.ndarray:
    """Decompress a chunk. Never allocates more than `chunk_bytes` for the result, even for malicious data.

    Raises DecompressionError if the result does not have this size, and ToolkitError if a library is missing.
    """
    plain = _inflate(stored, chunk_bytes) if filters[-1] == "deflate" else _decompress_zstd(stored, chunk_bytes)
    if len(plain) != chunk_bytes:
        raise DecompressionError(f"does not decompress to the {chunk_bytes} bytes of a chunk")
    return np.ascontiguousarray(np.frombuffer(plain, np.uint8).reshape(element_bytes, -1).T).reshape(-1)


def _inflate(stored: memoryview, chunk_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(stored, chunk_bytes + 1)
    except zlib.error as error:
        raise DecompressionError(str(error)) from None
    if not stream.eof or stream.unused_data:
        raise DecompressionError(f"does not end with the {chunk_bytes} bytes of a chunk")
    return plain


def _decompress_zstd(stored: memoryview, chunk_bytes: int) -> bytes:
    zstandard = _zstandard()
    try:
        # The library allocates the size that the frame states, so the size is checked first.
        if zstandard.get_frame_parameters(stored).content_size != chunk_bytes:
            raise DecompressionError(f"does not decompress to the {chunk_bytes} bytes of a chunk")
        plain: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecompressionError(str(error)) from None
    return plain


def set_filters(properties: h5p.PropDCID, kind: Compression) -> None:
    """Set the filters for the chunks of a new HDF5 dataset."""
    properties.set_shuffle()
    if kind == "gzip":
        properties.set_deflate(_LEVEL)
    else:
        _hdf5_plugins()  # HDF5 refuses to create a dataset with an unknown filter
        properties.set_filter(FILTER_NUMBERS["zstd"], h5z.FLAG_MANDATORY, (_LEVEL,))


@cache
def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard") from None
    module: Any = zstandard
    return module


@cache
def _hdf5_plugins() -> None:
    try:
        import hdf5plugin  # noqa: F401 - registers its filters
    except ImportError:
        raise _missing("hdf5plugin") from None


def _missing(library: str) -> ToolkitError:
    return ToolkitError(
        f"zstd compression of checkpoints requires {library}", fix="install the extra: pip install 'toolkit[zstd]'"
    )
