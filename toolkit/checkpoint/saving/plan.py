"""Plans which rank stores which part of the state, and reuses the plan while the state of every rank keeps its shape.

Planning with DCP costs about 0.3 ms per tensor, and sends all plans to rank 0 and back.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import chunk_of
from toolkit.checkpoint.format.layout import shard_name
from toolkit.checkpoint.format.manifest import Piece, TensorRecord
from toolkit.checkpoint.format.shard_layout import ShardLayout, StoredPiece, lay_out
from toolkit.checkpoint.saving.finish import WholePlan
from toolkit.checkpoint.tensors import dtype_name, meshes_of, refuse_nested
from toolkit.comm.agreement import Ranks

Path = tuple[str | int, ...]
# What one rank stores: the name of its shard file, its pieces, and the first byte of each piece.
StoredShare = tuple[str, Sequence[StoredPiece], Sequence[int]]


class SavePlanner(DefaultSavePlanner):
    """DCP's save planner with correct offsets: DCP itself computes wrong ones for some uneven parts (see `boxes`)."""

    def create_local_plan(self) -> SavePlan:
        """Return DCP's plan of what this rank writes."""
        plan = super().create_local_plan()
        items = [self._placed(item) for item in plan.items]
        self.plan = replace(plan, items=[item for item in items if not _is_empty_part(item)])
        return self.plan

    def _placed(self, item: WriteItem) -> WriteItem:
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor) or item.tensor_data is None:
            return item
        chunk = chunk_of(tensor, item.index.fqn)
        index = MetadataIndex(item.index.fqn, chunk.offsets)
        return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def _is_empty_part(item: WriteItem) -> bool:
    """Return whether this part of a non-empty tensor is empty: DCP might store it, not the part at the same offset."""
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


@dataclass(frozen=True)
class RankPlan:
    """What one rank stores: tensors (`items`) and plain values (`values` contains their keys).

    `layout` describes the file, which the whole node may share; `own` are the indices of this rank's items in it.
    """

    file: str
    layout: ShardLayout
    own: range
    items: tuple[WriteItem, ...]
    values: tuple[str, ...]
    any_values: bool  # whether any rank stores plain values
    is_of_node: bool = False


@dataclass(frozen=True)
class FlatState:
    """The state of a rank, flattened by DCP's planner. Its plan is valid while `shape` stays equal."""

    planner: SavePlanner
    shape: Hashable


@dataclass(frozen=True)
class _Share:
    items: tuple[WriteItem, ...]
    has_values: bool


class SavePlanning:
    """Plans the saves of one process and caches the last plan; `by_node` plans one shard file per node."""

    def __init__(self, ranks: Ranks, *, by_node: bool = False) -> None:
        self._ranks = ranks
        self._by_node = by_node
        self._shape: Hashable = None
        self.mine: RankPlan | None = None
        self.meshes: list[dict[str, Any]] = []
        self.whole: WholePlan | None = None

    def flatten(self, tensors: dict[str, Any]) -> FlatState:
        """Flatten this rank's state. Not collective."""
        planner = SavePlanner()
        planner.set_up_planner(tensors, is_coordinator=self._ranks.rank == 0)
        refuse_nested(planner.state_dict)
        shapes = tuple(_shape_of(name, value) for name, value in planner.state_dict.items())
        return FlatState(planner, (shapes, tuple(planner.mappings.items())))

    def is_new(self, state: FlatState) -> bool:
        """Return whether the cached plan does not fit this rank's state."""
        return state.shape != self._shape

    def plan(self, state: FlatState) -> None:
        """Make a new plan on all ranks. If any rank fails, all raise the same RankFailure and have no plan."""
        ranks = self._ranks
        self._shape, self.mine, self.whole = None, None, None
        plans = ranks.gather_objects(ranks.together(state.planner.create_local_plan))
        shares, metadata = ranks.together(lambda: _shared_out(state.planner, plans) if ranks.rank == 0 else ([], None))
        mine = ranks.scatter_objects(shares)
        planned = ranks.together(lambda: _rank_plan(mine, ranks, by_node=self._by_node))
        first, end = planned.own.start, planned.own.stop
        stored = ranks.gather_objects(
            (planned.file, planned.layout.pieces[first:end], planned.layout.starts[first:end])
        )
        self.whole = ranks.together(lambda: whole_plan(stored, metadata) if metadata else None)
        self.meshes = meshes_of(state.planner.state_dict.values())
        self.mine, self._shape = planned, state.shape


def _shared_out(planner: SavePlanner, plans: list[SavePlan]) -> tuple[list[_Share], dcp.Metadata]:
    """Return what each rank stores, and DCP's metadata. Only one rank stores a part that several ranks have."""
    shares, metadata = planner.create_global_plan(plans)
    has_values = any(isinstance(record, dcp.BytesStorageMetadata) for record in metadata.state_dict_metadata.values())
    return [_Share(tuple(share.items), has_values) for share in shares], metadata


def _rank_plan(share: _Share, ranks: Ranks, *, by_node: bool) -> RankPlan:
    items = tuple(item for item in share.items if item.type != WriteItemType.BYTE_IO)
    values = tuple(item.index.fqn for item in share.items if item.type == WriteItemType.BYTE_IO)
    pieces = tuple(map(stored_piece, items))
    if not by_node:
        file = shard_name(ranks.rank, ranks.size)
        return RankPlan(file, lay_out(pieces), range(len(pieces)), items, values, share.has_values)
    of_node = ranks.exchange_on_node(pieces)
    before = sum(map(len, of_node[: ranks.place_on_node]))
    # Every rank computes the layout, because that is faster than sending it.
    layout = lay_out(tuple(piece for of_rank in of_node for piece in of_rank))
    file = shard_name(ranks.node, ranks.nodes)
    return RankPlan(file, layout, range(before, before + len(pieces)), items, values, share.has_values, True)


def stored_piece(item: WriteItem) -> StoredPiece:
    """Return the box of a tensor that a DCP write item stores."""
    data = item.tensor_data
    assert data is not None
    chunk = data.chunk
    dtype = dtype_name(data.properties.dtype)
    return StoredPiece(item.index.fqn, dtype, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes))


def whole_plan(stored: Sequence[StoredShare], metadata: dcp.Metadata) -> WholePlan:
    """Build the plan of all ranks from DCP's metadata and the offsets of each rank's pieces."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for file, of_rank, starts in stored:
        for piece, start in zip(of_rank, starts, strict=True):
            pieces[piece.name].append(Piece(file, piece.offset, piece.extent, start))
    paths = paths_of(metadata)
    tensors = {
        name: TensorRecord(
            dtype=dtype_name(record.properties.dtype),
            shape=tuple(record.size),
            path=paths.get(name, (name,)),
            pieces=tuple(pieces[name]),
        )
        for name, record in metadata.state_dict_metadata.items()
        if isinstance(record, dcp.TensorStorageMetadata)
    }
    return WholePlan.of(tensors, paths, [file for file, _, _ in stored])


def _shape_of(name: str, value: Any) -> Hashable:
    """Return the properties of a value that affect the plan."""
    if isinstance(value, DTensor):
        return name, value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.dtype, value.shape
    return name, type(value)


def paths_of(metadata: dcp.Metadata) -> dict[str, Path]:
    """Return the parts that DCP joined to each key with dots, except outdated ones of keys that a planner renamed."""
    known = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {name: tuple(path) for name, path in known.items() if ".".join(map(str, path)) == name}
