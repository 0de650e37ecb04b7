"""Converts the JSON of a manifest, which may be untrusted, to a `Manifest`.

An attacker who can write into the folder can also write a matching digest. So each entry is checked before a file is
opened or memory is allocated: file names are valid, boxes are inside their tensors, bytes are inside their files, the
pieces contain each element of a tensor once, and paths match their keys, so that no two entries have the same path.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.chunks import Chunks, grid
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.checkpoint.format.filters import FILTERS
from toolkit.checkpoint.format.layout import digest_name
from toolkit.checkpoint.format.manifest import MOST_DIMENSIONS, FileRecord, Manifest, ObjectRecord, Piece, TensorRecord

__all__ = ["LARGEST"]

T = TypeVar("T")

LARGEST = 2**63 - 1
MOST_CHUNK_BYTES = 64 * 1024 * 1024  # the decompressed size; reading even a small box needs this much memory
_FILE = re.compile(r"shard-\d{5,9}-of-\d{5,9}\.(?:h5|digest)", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


class BodyError(ValueError):
    """A manifest contradicts itself or the format; the message names the key."""


def manifest_from(body: dict[str, Any], *, where: str) -> Manifest:
    """Convert parsed JSON to a manifest. Raises CorruptCheckpointError if it contradicts itself or the format."""
    return _checked(lambda: _manifest(body), where)


def _checked(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except BodyError as error:
        raise CorruptCheckpointError(str(error), where=where) from None
    except CorruptCheckpointError as error:  # decoding a value raised it, without the name of the file
        raise CorruptCheckpointError(error.message, where=where) from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"has a missing or invalid key: {error!r:.80}", where=where) from None


def files_from(body: dict[str, Any], *, where: str) -> tuple[FileRecord, ...]:
    """Return the files that a parsed JSON body lists, without checking the rest; errors as in `manifest_from`."""
    return _checked(lambda: _files(body["files"]), where)


def _manifest(body: dict[str, Any]) -> Manifest:
    files = _files(body["files"])
    tensors = {name: _tensor(record, name, files) for name, record in _table(body["tensors"], "tensors").items()}
    if any(record.filters for record in tensors.values()):
        _check_chunks_apart(tensors)
    objects = {
        name: ObjectRecord(_path(record["path"], name), jsonvalues.decode(record["value"], name))
        for name, record in _table(body["objects"], "objects").items()
    }
    if both := tensors.keys() & objects.keys():
        raise BodyError(f"{min(both)}: is listed both as a tensor and as an object")
    return Manifest(
        step=_count(body["step"], "step"),
        attempt=_count(body["attempt"], "attempt"),
        world_size=_count(body["world"]["size"], "world.size", least=1),
        mesh=[_table(mesh, "world.mesh") for mesh in body["world"]["mesh"]],
        saved_at=_text(body["saved_at"], "saved_at"),
        written_by=_text(body["written_by"], "written_by"),
        state=_table(jsonvalues.decode(_table(body["state"], "state"), "state"), "state"),
        objects=objects,
        tensors=tensors,
        files=files,
    )


def _files(listed: Any) -> tuple[FileRecord, ...]:
    files = []
    for record in listed:
        name, digest = _text(record["name"], "files"), _text(record["digest"], "files")
        if not _FILE.fullmatch(name):
            raise BodyError(f"{name!r:.80} is not a valid name of a shard or digest file")
        if not _DIGEST.fullmatch(digest):
            raise BodyError(f"{digest!r:.80} is not a valid digest for {name}")
        files.append(FileRecord(name, _count(record["size"], name), digest))
    names = {file.name for file in files}
    if len(names) < len(files):
        raise BodyError("lists a file twice")
    for name in names:
        if name.endswith(".h5") and digest_name(name) not in names:
            raise BodyError(f"lists {name} without its digest file")
    return tuple(files)


def _tensor(record: Any, name: str, files: Sequence[FileRecord]) -> TensorRecord:
    dtype, shape = _text(record["dtype"], name), _box(record["shape"], name)
    if dtype not in ELEMENTS:
        raise BodyError(f"{name}: contains elements of type {dtype!r:.40}, which this format does not support")
    element_bytes = ELEMENTS[dtype].size_bytes
    if prod(shape) * element_bytes > LARGEST:
        raise BodyError(f"{name}: a tensor of shape {list(shape)} is too large for a file")
    filters = _filters(record.get("filters", []), name)
    listed = record["pieces"]
    pieces = _rows(listed, shape, element_bytes, files)
    if not pieces:
        pieces = tuple(_piece(piece, name, shape, element_bytes, files, filters) for piece in listed)
        _check_cover(name, shape, pieces)
    return TensorRecord(dtype, shape, _path(record["path"], name), pieces)


def _rows(listed: Any, shape: tuple[int, ...], element_bytes: int, files: Sequence[FileRecord]) -> tuple[Piece, ...]:
    """Return the uncompressed pieces of a tensor that is whole or split along its first dimension, in their order.

    Return () if `_piece` must check them. A model has thousands of such tensors, for which this takes a third of the time.
    """
    height, width = (shape[0], shape[1:]) if shape else (1, ())
    row_bytes, zeros = prod(width) * element_bytes, (0,) * len(width)
    pieces, end = [], 0
    for piece in listed:
        if len(piece) != 4:
            return ()
        number, offset, extent, first = piece
        rows = extent[0] if shape and extent else height
        if not type(number) is type(first) is type(rows) is int or not 0 <= number < len(files):
            return ()
        box = ((end, *zeros), (rows, *width)) if shape else ((), ())
        file = files[number]
        is_next = offset == [*box[0]] and extent == [*box[1]] and rows >= 0 <= first
        if not is_next or first + rows * row_bytes > file.size or not file.name.endswith(".h5"):
            return ()
        pieces.append(Piece(file.name, *box, first))
        end += rows
    return tuple(pieces) if end == height else ()


def _filters(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or (value and tuple(value) not in FILTERS.values()):
        raise BodyError(f"{name}: {value!r:.80} is not a valid list of filters of this format")
    return tuple(value)


def _piece(
    listed: Any,
    name: str,
    shape: tuple[int, ...],
    element_bytes: int,
    files: Sequence[FileRecord],
    filters: tuple[str, ...],
) -> Piece:
    number, offset, extent, byte_offset, *more = listed
    number, byte_offset = _count(number, name), _count(byte_offset, name)
    offset, extent = _box(offset, name), _box(extent, name)
    if number >= len(files) or not files[number].name.endswith(".h5"):
        raise BodyError(f"{name}: a piece is in file {number}, which is not a shard file")
    inside = len(offset) == len(extent) == len(shape) and all(
        at + count <= size for at, count, size in zip(offset, extent, shape, strict=True)
    )
    if not inside:
        raise BodyError(f"{name}: the piece at {list(offset)} of shape {list(extent)} is outside of {list(shape)}")
    file = files[number]
    if more:
        (chunks,) = more
        if byte_offset:
            raise BodyError(f"{name}: the piece at {list(offset)} has both chunks and a byte offset")
        return Piece(
            file.name,
            offset,
            extent,
            0,
            _chunks(chunks, f"{name}: the piece at {list(offset)}", extent, element_bytes, file, filters),
        )
    if byte_offset + prod(extent) * element_bytes > file.size:
        raise BodyError(f"{name}: the piece at {list(offset)} extends beyond the end of {file.name}")
    return Piece(file.name, offset, extent, byte_offset)


def _chunks(
    listed: Any, what: str, extent: tuple[int, ...], element_bytes: int, file: FileRecord, filters: tuple[str, ...]
) -> Chunks:
    """Return the chunks of a piece, after checking that they cover it and are inside the file."""
    shape, places = listed
    shape = _box(shape, what)
    if not filters:
        raise BodyError(f"{what} has chunks, but its tensor has no filters")
    if len(shape) != len(extent) or not all(1 <= count <= size for count, size in zip(shape, extent, strict=True)):
        raise BodyError(f"{what} has chunks of shape {list(shape)}, which does not fit the shape of the piece")
    if prod(shape) * element_bytes > MOST_CHUNK_BYTES:
        raise BodyError(f"{what} has chunks of more than {MOST_CHUNK_BYTES} bytes")
    if not isinstance(places, list) or len(places) != prod(grid(extent, shape)):
        raise BodyError(f"{what} has the wrong number of chunks")
    counted = tuple((_count(first, what), _count(size, what, least=1)) for first, size in places)
    chunks = Chunks(shape, counted, filters)
    if any(first + size > file.size for first, size in chunks.places):
        raise BodyError(f"{what} has a chunk that extends beyond the end of {file.name}")
    return chunks


def _check_cover(name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Reject holes, for which a load would leave memory unchanged, and overlaps, which would be ambiguous."""
    filled = [piece for piece in pieces if piece.size]
    if sum(piece.size for piece in filled) != prod(shape):
        raise BodyError(f"{name}: its pieces do not contain each element of {list(shape)} exactly once")
    if _are_slices(filled):
        return
    for number, piece in enumerate(filled):
        if any(_overlap(piece, other) for other in filled[:number]):
            raise BodyError(f"{name}: two pieces contain the same elements, at {list(piece.offset)}")


def _are_slices(pieces: Sequence[Piece]) -> bool:
    """Return whether the pieces differ along only one dimension and do not overlap there, which is the common case."""
    if len(pieces) < 2:
        return True
    first = pieces[0]
    axes = {
        axis
        for piece in pieces
        for axis, (at, count) in enumerate(zip(piece.offset, piece.shape, strict=True))
        if (at, count) != (first.offset[axis], first.shape[axis])
    }
    if len(axes) != 1:
        return False
    (axis,) = axes
    ends = sorted((piece.offset[axis], piece.offset[axis] + piece.shape[axis]) for piece in pieces)
    return all(end <= start for (_, end), (start, _) in pairwise(ends))


def _overlap(one: Piece, other: Piece) -> bool:
    boxes = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(at < begin + size and begin < at + count for at, count, begin, size in boxes)


def _check_chunks_apart(tensors: dict[str, TensorRecord]) -> None:
    """Reject chunks that share bytes, with which a small file could expand to any number of tensors."""
    chunks = sorted(
        (piece.file, inside.start, inside.stop, name)
        for name, record in tensors.items()
        for piece in record.pieces
        if piece.chunks is not None
        for inside in record.bytes_of_file(piece)
    )
    for (file, _, end, _), (following_file, start, _, name) in pairwise(chunks):
        if file == following_file and end > start:
            raise BodyError(f"{name}: a chunk at byte {start} of {file} overlaps another one")


def _box(value: Any, name: str) -> tuple[int, ...]:
    """Parse a list of offsets or sizes, one per dimension."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        raise BodyError(f"{name}: expected a list of at most {MOST_DIMENSIONS} numbers, got {value!r:.80}")
    for number in value:  # without a generator, for thousands of tensors
        if type(number) is not int or not 0 <= number <= LARGEST:
            _count(number, name)
    return tuple(value)


def _path(value: Any, name: str) -> tuple[str | int, ...]:
    """Parse a path whose parts, joined by dots, must equal `name`: with conflicting paths an export would lose tensors."""
    if value == [name]:  # the fast path for a flat state
        return (name,)
    if not isinstance(value, list) or not all(isinstance(part, str) or type(part) is int for part in value):
        raise BodyError(f"{name}: {value!r:.80} is not a valid path")
    if not value or ".".join(map(str, value)) != name:
        raise BodyError(f"{name}: its path {value!r:.80} does not match its key")
    return tuple(value)


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError(f"{what}: expected a table, got {value!r:.40}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BodyError(f"{what}: expected a string, got {value!r:.40}")
    return value


def _count(value: Any, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= LARGEST:
        raise BodyError(f"{what}: expected an integer of at least {least}, got {value!r:.40}")
    return value
