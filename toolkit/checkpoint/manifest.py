"""`manifest.json`: what a checkpoint holds and where, with the size and digest of every file.

It is the last file written before the commit. Everything that a reader must know stands in it, so that a
shard file is opened only when its data are needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint import jsonvalues
from toolkit.checkpoint.elements import element
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.layout import MANIFEST
from toolkit.errors import ToolkitError

FORMAT = "toolkit-checkpoint"
SCHEMA = 1
_UNSIGNED = "0" * 32


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: `size` in bytes, `digest` as `BlockDigests.whole`."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in one shard file: `offset` in the global tensor, contiguous from `byte_offset`."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int

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
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest and the index."""
        return sum(file.size for file in self.files)

    def file(self, name: str) -> FileRecord:
        """The record of one file."""
        return next(file for file in self.files if file.name == name)


def manifest_text(manifest: Manifest) -> str:
    """The file's text. Its digest is taken over the text in which the digest's own digits are zeros."""
    # Pieces name their file by its place in `files`: names would be most of the text.
    place = {file.name: number for number, file in enumerate(manifest.files)}
    body = {
        "format": FORMAT,
        "schema": SCHEMA,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world": {"size": manifest.world_size, "mesh": manifest.mesh},
        "saved_at": manifest.saved_at,
        "written_by": manifest.written_by,
        "state": jsonvalues.encode(manifest.state, "state"),
        "objects": {
            name: {"path": list(record.path), "value": jsonvalues.encode(record.value, name)}
            for name, record in manifest.objects.items()
        },
        "tensors": {name: _tensor_json(record, place) for name, record in manifest.tensors.items()},
        "files": [{"name": file.name, "size": file.size, "digest": file.digest} for file in manifest.files],
        "digest": _UNSIGNED,
    }
    unsigned = json.dumps(body, allow_nan=False)
    head, tail = unsigned.rsplit(_UNSIGNED, 1)
    return head + xxhash.xxh3_128_hexdigest(unsigned.encode()) + tail


def _tensor_json(record: TensorRecord, place: dict[str, int]) -> dict[str, Any]:
    return {
        "dtype": record.dtype,
        "shape": list(record.shape),
        "path": list(record.path),
        "pieces": [
            [place[piece.file], list(piece.offset), list(piece.shape), piece.byte_offset] for piece in record.pieces
        ],
    }


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CorruptCheckpointError: when it is missing or damaged.
        ToolkitError: when it is whole but of another version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        raise CorruptCheckpointError("is missing", where=str(path)) from None
    try:
        body = json.loads(text)
        digest = body["digest"]
    except (ValueError, KeyError, TypeError):
        raise CorruptCheckpointError("is not a manifest", where=str(path)) from None
    head, _, tail = text.rpartition(str(digest))
    unsigned = head + _UNSIGNED + tail
    if xxhash.xxh3_128_hexdigest(unsigned.encode("utf-8", "surrogateescape")) != digest:
        raise CorruptCheckpointError("does not have its own digest", where=str(path))
    # Only a whole file can be said to be of another version.
    if (body.get("format"), body.get("schema")) != (FORMAT, SCHEMA):
        raise ToolkitError(
            f"is of format {body.get('format')} {body.get('schema')}, this version reads {FORMAT} {SCHEMA}",
            where=str(path),
            fix="use the version of toolkit that wrote it, or a newer one",
        )
    return _manifest_from(body)


def _manifest_from(body: dict[str, Any]) -> Manifest:
    files = tuple(FileRecord(**file) for file in body["files"])
    return Manifest(
        step=body["step"],
        attempt=body["attempt"],
        world_size=body["world"]["size"],
        mesh=body["world"]["mesh"],
        saved_at=body["saved_at"],
        written_by=body["written_by"],
        state=jsonvalues.decode(body["state"]),
        objects={
            name: ObjectRecord(tuple(record["path"]), jsonvalues.decode(record["value"]))
            for name, record in body["objects"].items()
        },
        tensors={
            name: TensorRecord(
                dtype=record["dtype"],
                shape=tuple(record["shape"]),
                path=tuple(record["path"]),
                pieces=tuple(
                    Piece(files[number].name, tuple(offset), tuple(shape), byte_offset)
                    for number, offset, shape, byte_offset in record["pieces"]
                ),
            )
            for name, record in body["tensors"].items()
        },
        files=files,
    )
