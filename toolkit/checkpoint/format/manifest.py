"""The manifest: which tensors and values a checkpoint contains, in which files, and the file sizes and digests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from toolkit.checkpoint.format.chunks import Chunks
from toolkit.checkpoint.format.elements import element
from toolkit.errors import ToolkitError

__all__ = ["Manifest", "Piece", "TensorRecord"]

MOST_DIMENSIONS = 32  # HDF5's limit (H5S_MAX_RANK)
IMPORTED = ", imported from "  # a part of `written_by` in an imported checkpoint


def check_dimensions(shape: Sequence[int], where: str) -> None:
    """Raise a ToolkitError for a tensor with more dimensions than HDF5 supports."""
    if len(shape) > MOST_DIMENSIONS:
        raise ToolkitError(
            f"has {len(shape)} dimensions; a checkpoint supports at most {MOST_DIMENSIONS}",
            where=where,
            fix="reshape this tensor to fewer dimensions, and save again",
        )


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: `size` is in bytes, `digest` is its `BlockDigests.whole`."""

    name: str
    size: int
    digest: str


class Piece(NamedTuple):  # a dataclass takes twice as long to create, and there are thousands
    """A box at `offset` of a tensor, in one shard file: contiguous from `byte_offset`, or compressed as `chunks`."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int
    chunks: Chunks | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor with its global shape. `path` contains the parts of its key before they were joined with dots."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.shape) * element(self.dtype).size_bytes

    @property
    def filters(self) -> tuple[str, ...]:
        """The filters of the compressed pieces, in the order in which they are applied; () if there are none."""
        return next((piece.chunks.filters for piece in self.pieces if piece.chunks is not None), ())

    def bytes_of_file(self, piece: Piece) -> list[range]:
        """Return the byte ranges of a piece of this tensor in the shard file."""
        if piece.chunks is not None:
            return [piece.chunks.bytes_of_file(number) for number in range(len(piece.chunks.places))]
        return [range(piece.byte_offset, piece.byte_offset + piece.size * element(self.dtype).size_bytes)]


@dataclass(frozen=True)
class ObjectRecord:
    """A non-tensor value of the state dict."""

    path: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. `state` is what the caller passed; `mesh` describes the device meshes."""

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
        """Whether the checkpoint was imported: it contains tensors and values but no training state to resume."""
        return IMPORTED in self.written_by and not self.state

    @property
    def size_bytes(self) -> int:
        """The total size of all files in bytes, except the manifest and the index."""
        return sum(file.size for file in self.files)

    def file(self, name: str) -> FileRecord:
        """Return the record of one file."""
        return next(file for file in self.files if file.name == name)
