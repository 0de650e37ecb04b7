"""Finishes a save: each rank writes its digests, then rank 0 writes the index and the manifest and commits."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folder.commit import commit
from toolkit.checkpoint.format.chunks import Chunks
from toolkit.checkpoint.format.digests import BlockDigests, digests_of_text
from toolkit.checkpoint.format.index import index_of
from toolkit.checkpoint.format.layout import INDEX, MANIFEST, digest_name, part_folder
from toolkit.checkpoint.format.manifest import FileRecord, Manifest, ObjectRecord, Piece, TensorRecord
from toolkit.checkpoint.format.manifest_file import manifest_text, tensors_text
from toolkit.checkpoint.format.shard_layout import StoredPiece
from toolkit.checkpoint.saving.compressed_shard import Place
from toolkit.errors import OwnFailureError
from toolkit.rundir.files import mode_of_files_in, write_bytes, write_text

_WRITTEN = struct.Struct("<q16sq16s")  # sizes and digests of a shard file and of its digest file
WRITTEN_BYTES = _WRITTEN.size
# All ranks wait while rank 0 creates the first index, about 10 microseconds per piece. Larger checkpoints get no index
# unless the user runs `toolkit ckpt index`.
MOST_INDEXED_PIECES = 50_000


@dataclass(frozen=True)
class Description:
    """The manifest of a save without its tensors and files. `final` is the committed folder, which `attempt` writes.

    `token` is the same on all ranks of a save and differs between saves. With `replace`, existing checkpoints of the
    same name and of later steps are renamed. With `overwrite`, an existing one of the same name is replaced.
    """

    final: Path
    written_by: str
    step: int = 0
    attempt: int = 0
    token: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    mesh: list[dict[str, Any]] = field(default_factory=list)
    replace: bool = False
    overwrite: bool = False

    @property
    def part(self) -> Path:
        """The folder in which the checkpoint is written before the commit."""
        return part_folder(self.final, self.attempt, self.token)


@dataclass(frozen=True)
class WholePlan:
    """What all ranks together store: the tensors, their part of the manifest, the path of each key, and `index.h5`.

    `files` contains all files in the order of the manifest; `index` is empty if there are too many pieces.
    """

    files_of_ranks: tuple[str, ...]
    tensors: dict[str, TensorRecord]
    paths: dict[str, tuple[str | int, ...]]
    files: tuple[str, ...]
    tensors_text: str
    index: bytes

    @classmethod
    def of(
        cls, tensors: dict[str, TensorRecord], paths: Mapping[str, Sequence[str | int]], files_of_ranks: Sequence[str]
    ) -> WholePlan:
        """Build the plan from the tensors and files of all ranks."""
        shards = {piece.file for record in tensors.values() for piece in record.pieces}
        files = tuple(sorted(name for shard in shards for name in (shard, digest_name(shard))))
        has_index = sum(len(record.pieces) for record in tensors.values()) <= MOST_INDEXED_PIECES
        return cls(
            files_of_ranks=tuple(files_of_ranks),
            tensors=tensors,
            paths={name: tuple(path) for name, path in paths.items()},
            files=files,
            tensors_text=tensors_text(tensors, files),
            index=index_of(tensors) if has_index else b"",
        )

    def placed(self, shares: Iterable[tuple[str, Sequence[StoredPiece], Sequence[Place]]]) -> WholePlan:
        """Return the plan with the actual places of the pieces; `shares`: the (file, pieces, places) of each rank."""
        places = {
            (file, piece.name, piece.offset): place
            for file, pieces, of_rank in shares
            for piece, place in zip(pieces, of_rank, strict=True)
        }
        tensors = {
            name: replace(
                record, pieces=tuple(_placed(piece, places[piece.file, name, piece.offset]) for piece in record.pieces)
            )
            for name, record in self.tensors.items()
        }
        return replace(self, tensors=tensors, tensors_text=tensors_text(tensors, self.files))


def _placed(piece: Piece, place: Place) -> Piece:
    if isinstance(place, Chunks):
        return piece._replace(byte_offset=0, chunks=place)
    return piece._replace(byte_offset=place, chunks=None)


def write_digests(shard: Path, digests: BlockDigests) -> bytes:
    """Write and sync the digest file of a shard file. Returns the sizes and digests of both, for `finish_save`."""
    content = digests.text()
    write_text(shard.with_name(digest_name(shard.name)), content, mode=mode_of_files_in(shard.parent))
    of_content = digests_of_text(content)
    return _WRITTEN.pack(digests.size, bytes.fromhex(digests.whole), of_content.size, bytes.fromhex(of_content.whole))


def finish_save(
    description: Description, plan: WholePlan, written: Mapping[str, bytes], values: Mapping[str, Any]
) -> None:
    """Write the index and the manifest and commit, after all ranks have written their files.

    `written` contains the results of `write_digests` by shard file, `values` the non-tensor values by key.

    Raises:
        OwnFailureError: a file differs from what its rank wrote, or a later attempt owns the run.
        OSError: the index or the manifest could not be written.
    """
    part = description.part
    manifest = Manifest(
        step=description.step,
        attempt=description.attempt,
        world_size=len(plan.files_of_ranks),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        written_by=description.written_by,
        mesh=description.mesh,
        state=description.state,
        objects={name: ObjectRecord(plan.paths.get(name, (name,)), value) for name, value in values.items()},
        tensors=plan.tensors,
        files=tuple(_file_records(plan.files, written)),
    )
    _check_and_clean(part, {file.name: file.size for file in manifest.files})
    mode = mode_of_files_in(part)
    with ThreadPoolExecutor(1) as pool:  # two parallel syncs take as long as one
        indexed = pool.submit(write_bytes, part / INDEX, plan.index, mode=mode) if plan.index else None
        write_text(part / MANIFEST, manifest_text(manifest, tensors=plan.tensors_text), mode=mode)
        if indexed:
            indexed.result()
    commit(part, description.final, description.attempt, replace=description.replace, overwrite=description.overwrite)


def _file_records(names: Sequence[str], written: Mapping[str, bytes]) -> list[FileRecord]:
    records = {}
    for shard, packed in written.items():
        size, digest, digest_size, digest_digest = _WRITTEN.unpack(packed)
        records[shard] = FileRecord(shard, size, digest.hex())
        records[digest_name(shard)] = FileRecord(digest_name(shard), digest_size, digest_digest.hex())
    return [records[name] for name in names]


def _check_and_clean(part: Path, sizes: Mapping[str, int]) -> None:
    """Check that every file has the size that its rank wrote, and remove files of an older checkpoint."""
    existing = {path.name: path for path in part.iterdir()}
    for name, size in sizes.items():
        actual = existing[name].stat().st_size if name in existing else None
        if actual != size:
            got = "no file" if actual is None else f"{actual} bytes"
            raise OwnFailureError(f"expected the {size} bytes that its rank wrote, got {got}", where=name)
    for name in existing.keys() - sizes.keys():
        existing[name].unlink()
