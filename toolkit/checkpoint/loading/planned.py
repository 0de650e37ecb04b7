"""Reads what a rank needs from the shard files of a checkpoint into its tensors, with a plan of DCP or its own."""

import io
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import box_of
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.loading.planner import Shape, put_value, refuse_differences
from toolkit.checkpoint.loading.shard_reader import ShardReader
from toolkit.checkpoint.loading.wanted import FileReads, WantedBox, reads_of
from toolkit.checkpoint.tensors import as_numpy, dtype_name, is_unchanged, refuse_nested, refuse_no_dict, shared_numpy
from toolkit.errors import ToolkitError

Blocks = Mapping[str, Collection[int]]  # block numbers by shard file
_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENTS}


@dataclass(frozen=True)
class LoadTarget:
    """The target of a load: `tensors`, the `optional` keys that a checkpoint may lack, and the number of `threads`."""

    tensors: dict[str, Any]
    optional: tuple[str, ...]
    threads: int

    @cached_property
    def flat(self) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
        """The tensors and values by joined key, and their paths. Raises ToolkitError for no dict or a nested tensor."""
        refuse_no_dict(self.tensors, "tensors")
        flat, paths = flatten_state_dict(self.tensors)
        refuse_nested(flat)
        return flat, paths


class Move(NamedTuple):
    """A box of a piece, from `start` on, and the tensor of its shape that receives it; then `done` is called, if any."""

    name: str
    piece: Piece
    start: tuple[int, ...]
    target: torch.Tensor
    done: Callable[[], None] | None = None


class PlannedLoad:
    """What one rank reads from a checkpoint. The constructor reads no data; `read` fills the tensors."""

    def __init__(
        self, folder: Path, manifest: Manifest, moves: Iterable[Move], values: Mapping[str, Callable[[object], None]]
    ) -> None:
        """Prepare the moves; `values` contains a function for each value to set.

        Raises ToolkitError if the type of a tensor cannot be converted from the checkpoint's.
        """
        self._folder = folder
        self._manifest = manifest
        self._values = values
        self._after: list[Callable[[], object]] = []
        boxes: dict[str, list[WantedBox]] = defaultdict(list)
        for move in moves:
            boxes[move.piece.file].append(self._box(move))
            if move.done is not None:
                self._after.append(move.done)
        self._reads: dict[str, FileReads] = {file: reads_of(of_file) for file, of_file in boxes.items()}

    def touched_blocks(self) -> dict[str, set[int]]:
        """Return the blocks that `read` reads, by shard file."""
        return {file: reads.touched() for file, reads in self._reads.items()}

    def read(self, *, threads: int = 1, checked_by_others: Blocks | None = None) -> int:
        """Fill the tensors and return the number of bytes read. After an error the tensors are undefined.

        Raises CorruptCheckpointError for damage, and OwnFailureError if this host cannot read a file.
        """
        for name, put in self._values.items():
            put(jsonvalues.restored(self._manifest.objects[name].value, name))
        bytes_read = 0
        for file, reads in self._reads.items():
            with ShardReader(self._folder / file, self._manifest.file(file), threads=threads) as shard:
                shard.read(reads, checked_by_others=(checked_by_others or {}).get(file, ()))
                bytes_read += shard.bytes_read
        for finish in self._after:
            finish()
        return bytes_read

    def _box(self, move: Move) -> WantedBox:
        """Return the box to read. Another type or device needs a buffer in between."""
        stored = _TYPES[self._manifest.tensors[move.name].dtype]
        target = move.target
        out = shared_numpy(target) if target.dtype == stored else None
        if out is None:
            _check_conversion(move.name, stored, target.dtype)
            buffer = torch.empty(target.shape, dtype=stored)
            self._after.append(partial(target.copy_, buffer))
            out = as_numpy(buffer, move.name)
        return WantedBox(move.piece, move.start, out)


def planned_by(folder: Path, manifest: Manifest, plan: LoadPlan, planner: LoadPlanner) -> PlannedLoad:
    """Return the load of a DCP plan; errors as in `PlannedLoad`."""

    def moves() -> Iterator[Move]:
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                name, target = item.storage_index.fqn, planner.resolve_tensor(item).detach()
                piece = piece_of(manifest.tensors[name], item.storage_index)
                yield Move(
                    name, piece, tuple(item.storage_offsets), target, partial(planner.commit_tensor, item, target)
                )

    values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
    put = {item.storage_index.fqn: partial(_put, planner, item) for item in values}
    return PlannedLoad(folder, manifest, moves(), put)


def _put(planner: LoadPlanner, item: ReadItem, value: object) -> None:
    """Set a value in the state. DCP's own method would add a string as a key beside an integer key of a dict."""
    if is_unchanged(planner, DefaultLoadPlanner, "load_bytes"):
        assert isinstance(planner, DefaultLoadPlanner)
        path = planner.mappings[item.dest_index.fqn] if planner.flatten_state_dict else (item.dest_index.fqn,)
        put_value(planner.original_state_dict if planner.flatten_state_dict else planner.state_dict, path, value)
        return
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    planner.load_bytes(item, content)


def planned_load(folder: Path, manifest: Manifest, wanted: LoadTarget) -> tuple[PlannedLoad, tuple[str, ...]]:
    """Plan this rank's load, without DCP, which takes 0.1 ms per tensor. Also return the names that the checkpoint lacks.

    Raises ToolkitError if a tensor is missing and not optional, or has another shape.
    """
    flat, paths = wanted.flat
    saved: dict[str, Shape] = dict.fromkeys(manifest.objects)
    saved |= {name: record.shape for name, record in manifest.tensors.items()}
    missing = refuse_differences(flat, saved, wanted.optional)
    values = {name: partial(put_value, wanted.tensors, paths[name]) for name in flat if name in manifest.objects}
    return PlannedLoad(folder, manifest, _moves(flat, manifest), values), missing


def _moves(flat: Mapping[str, Any], manifest: Manifest) -> Iterator[Move]:
    """Yield the overlaps of this rank's tensors with the pieces of the checkpoint."""
    for name, tensor in flat.items():
        record = manifest.tensors.get(name)
        if record is None or (isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None):
            continue
        is_part = isinstance(tensor, DTensor)
        target = tensor.to_local() if is_part else tensor
        begin, shape = box_of(tensor, name) if is_part else ((0,) * target.dim(), record.shape)
        for piece in record.pieces:  # a fast path for the same part as in the save; pieces do not overlap
            if piece.offset == begin and piece.shape == shape:
                yield Move(name, piece, (0,) * len(begin), target)
                break
        else:
            yield from _overlaps(name, record, begin, shape, target)


def _overlaps(
    name: str, record: TensorRecord, begin: tuple[int, ...], shape: tuple[int, ...], target: torch.Tensor
) -> Iterator[Move]:
    """Yield the overlaps of `target`, the box at `begin` of a tensor, with the pieces of the tensor."""
    for piece in record.pieces:
        inside = list(map(_overlap, begin, shape, piece.offset, piece.shape))
        if all(inside):
            start = tuple(part.start - at for part, at in zip(inside, piece.offset, strict=True))
            own = tuple(slice(part.start - at, part.stop - at) for part, at in zip(inside, begin, strict=True))
            yield Move(name, piece, start, target[own])


def _overlap(begin: int, size: int, other_begin: int, other_size: int) -> range:
    return range(max(begin, other_begin), min(begin + size, other_begin + other_size))


def metadata_of(manifest: Manifest) -> dcp.Metadata:
    """Convert a manifest to DCP metadata."""
    records: dict[str, dcp.STORAGE_TYPES] = {
        name: _storage_metadata(record) for name, record in manifest.tensors.items()
    }
    records.update({name: dcp.BytesStorageMetadata() for name in manifest.objects})
    paths = {name: record.path for name, record in manifest.tensors.items()}
    paths.update({name: record.path for name, record in manifest.objects.items()})
    return dcp.Metadata(records, planner_data=paths, storage_data={})


def _storage_metadata(record: TensorRecord) -> dcp.TensorStorageMetadata:
    return dcp.TensorStorageMetadata(
        properties=dcp.TensorProperties(dtype=getattr(torch, record.dtype)),
        size=torch.Size(record.shape),
        chunks=[dcp.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in record.pieces],
    )


def piece_of(record: TensorRecord, index: dcp.MetadataIndex) -> Piece:
    """Return the piece that a DCP read item refers to."""
    offset = tuple(index.offset or ())
    if index.index is not None and record.pieces[index.index].offset == offset:
        return record.pieces[index.index]
    return next(piece for piece in record.pieces if piece.offset == offset)


def _check_conversion(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Raise a ToolkitError if the types differ, except for two float types: their precision may change."""
    if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
        raise ToolkitError(
            f"is {dtype_name(stored)} in the checkpoint but {dtype_name(wanted)} in memory",
            where=name,
            fix=f"load it into a tensor of type {dtype_name(stored)}",
        )
