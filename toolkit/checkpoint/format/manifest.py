"""The contents of a checkpoint and their files, with the size and digest of every file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from toolkit.checkpoint.format.chunks import Chunks
from toolkit.checkpoint.format.elements import element
from toolkit.errors import ToolkitError

__all__ = ["Manifest", "Piece", "TensorRecord"]

MOST_DIMENSIONS = 32  # HDF5's limit (H5S_MAX_RANK)
IMPORTED = ", imported from "  # in `written_by` of an imported checkpoint


def check_dimensions(shape: Sequence[int], where: str) -> None:
    """Raise a ToolkitError for a tensor with more dimensions than HDF5 supports."""
    if len(shape) > MOST_DIMENSIONS:
        raise ToolkitError(
            f"has {len(shape)} dimensions; the limit of a checkpoint is {MOST_DIMENSIONS}",
            where=where,
            fix="reshape it to fewer dimensions, and save again",
        )


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: `size` in bytes, `digest` as `BlockDigests.whole`."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in one shard file: `offset` in the tensor, contiguous from `byte_offset` (0 with `chunks`)."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int
    chunks: Chunks | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor by its global shape. `path` is the key's parts before they were joined with dots."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * element(self.dtype).size_bytes

    @property
    def filters(self) -> tuple[str, ...]:
        """The filters of all chunks of its compressed pieces, in order."""
        return next((piece.chunks.filters for piece in self.pieces if piece.chunks is not None), ())

    def bytes_of_file(self, piece: Piece) -> list[range]:
        """The bytes of one of its pieces in the piece's file."""
        if piece.chunks is not None:
            return [piece.chunks.bytes_of_file(number) for number in range(len(piece.chunks.places))]
        return [range(piece.byte_offset, piece.byte_offset + piece.size * element(self.dtype).size_bytes)]


@dataclass(frozen=True)
class ObjectRecord:
    """A value of the state dict that is not a tensor."""

    path: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its data. `state` is the caller's JSON; `mesh` describes the saving ranks."""

    step: int
    attempt: int
    world_size: int
    saved_at: str
    written_by: str
    mesh: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, ObjectRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()

    @property
    def is_imported(self) -> bool:
        """Whether it was imported: it contains tensors and values, but no training state to resume."""
        return IMPORTED in self.written_by and not self.state

    @property
    def size_bytes(self) -> int:
        """Bytes of all files except the manifest and the index."""
        return sum(file.size for file in self.files)

    def file(self, name: str) -> FileRecord:
        """The record of one file."""
        return next(file for file in self.files if file.name == name)
