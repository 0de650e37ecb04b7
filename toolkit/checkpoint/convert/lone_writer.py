"""Writes and commits a checkpoint in one process without torch, for imports."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.commit import commit, open_part, refuse_existing
from toolkit.checkpoint.folder.deletion import discard
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.digests import digests_of_file
from toolkit.checkpoint.format.index import write_index
from toolkit.checkpoint.format.layout import MANIFEST, digest_name, new_token, shard_name
from toolkit.checkpoint.format.manifest import IMPORTED, FileRecord, Manifest, ObjectRecord, Piece, TensorRecord
from toolkit.checkpoint.format.manifest_body import manifest_from
from toolkit.checkpoint.format.manifest_file import manifest_text
from toolkit.checkpoint.saving.finish import MOST_INDEXED_PIECES
from toolkit.checkpoint.saving.streamed_shard import StreamedShard, stream_shard
from toolkit.errors import ToolkitError
from toolkit.rundir.files import mode_of_files_in, sync, write_text
from toolkit.version import VERSION


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: `pieces` yields its parts as (offset, array of the `Element.memory` type); `box` reads one part."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    pieces: Callable[[], Iterable[tuple[tuple[int, ...], np.ndarray]]]
    box: Callable[[Sequence[int], Sequence[int]], np.ndarray] | None = None


def write_checkpoint(
    final: Path, step: int, tensors: Mapping[str, NewTensor], values: Mapping[str, ObjectRecord], *, made_from: str
) -> Manifest:
    """Write and commit the checkpoint `final`, with one piece at a time in memory. A failure leaves no files.

    Raises ToolkitError if `final` exists, a value cannot be stored, or the pieces of a tensor do not cover it.
    """
    refuse_existing(final)
    for name, record in values.items():
        jsonvalues.encode(record.value, name)
    part = open_part(final, 0, new_token())
    try:
        records, files = _write_shard(part, tensors)
        manifest = Manifest(
            step=step,
            attempt=0,
            world_size=1,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            written_by=f"toolkit {VERSION}{IMPORTED}{made_from}",
            objects=dict(values),
            tensors=records,
            files=files,
        )
        _check(manifest, made_from)
        if sum(len(record.pieces) for record in records.values()) <= MOST_INDEXED_PIECES:
            write_index(part, manifest)
        write_text(part / MANIFEST, manifest_text(manifest), mode=mode_of_files_in(part))
        commit(part, final, 0)
    except BaseException:  # including Ctrl-C
        discard(part)
        raise
    return manifest


def _write_shard(
    part: Path, tensors: Mapping[str, NewTensor]
) -> tuple[dict[str, TensorRecord], tuple[FileRecord, ...]]:
    if not tensors:
        return {}, ()
    name = shard_name(0, 1)
    with stream_shard(part / name) as shard:
        records = {key: _write_tensor(shard, name, key, tensor) for key, tensor in tensors.items()}
    sync(part / name)
    digests = digests_of_file(part / name)
    digest_path = part / digest_name(name)
    write_text(digest_path, digests.text(), mode=mode_of_files_in(part))
    of_digests = digests_of_file(digest_path)
    return records, (
        FileRecord(digest_path.name, of_digests.size, of_digests.whole),
        FileRecord(name, digests.size, digests.whole),
    )


def _write_tensor(shard: StreamedShard, file: str, key: str, tensor: NewTensor) -> TensorRecord:
    pieces = []
    for offset, array in tensor.pieces():
        start = shard.write(key, tensor.dtype, tensor.shape, offset, array)
        pieces.append(Piece(file, offset, array.shape, start))
    return TensorRecord(tensor.dtype, tensor.shape, tensor.path, tuple(pieces))


def _check(manifest: Manifest, made_from: str) -> None:
    """Raise a ToolkitError if a load would reject the manifest because pieces of the source overlap or are missing."""
    try:
        manifest_from(json.loads(manifest_text(manifest)), where="")
    except CorruptCheckpointError as error:
        raise ToolkitError(error.message, where=made_from, fix="save or fetch this source again") from None
