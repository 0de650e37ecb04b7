"""Offset and shape of this rank's part of a DTensor.

FSDP2 over tensor parallel shards a dimension twice, from right to left, and torch 2.13 computes the offset of an uneven
part as if it were sharded once: 7 rows on 3 x 2 ranks overlap, or a row is missing.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from toolkit.errors import OwnFailureError

__all__ = ["box_of"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole, and shape


def box_of(tensor: DTensor, name: str) -> Box:
    """The box of this rank's part of a tensor; OwnFailureError if its placements give another box, or several."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    offset, shape = _placed(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements), tuple(coordinate))
    local = tuple(tensor.to_local().shape)
    if local != shape and not (0 in local and 0 in shape):
        raise OwnFailureError(
            f"expected a part of {list(shape)} for {tensor.placements} on a mesh of "
            f"{tuple(tensor.device_mesh.shape)}, got {list(local)}",
            where=name,
            fix="make the dimension divisible by the ranks that shard it",
        )
    return offset, shape


@lru_cache(maxsize=4096)  # a model has few distinct shapes, and torch takes half a millisecond per call
def _placed(
    whole: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> Box:
    if any(isinstance(placement, _StridedShard) for placement in placements):
        return strided_box(whole, tuple(mesh.shape), coordinate, placements)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(offset), tuple(shape)


def strided_box(
    whole: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """Like `box_of`, for a dimension that is sharded from right to left."""
    offset, shape = [0] * len(whole), list(whole)
    for mesh_dim in _in_order_of_sharding(mesh, placements):
        placement = placements[mesh_dim]
        assert isinstance(placement, (Shard, _StridedShard))
        dim = placement.dim
        length = -(-shape[dim] // mesh[mesh_dim])  # as torch.chunk does: the last parts may be short or empty
        begin = min(coordinate[mesh_dim] * length, shape[dim])
        offset[dim] += begin
        shape[dim] = min(length, shape[dim] - begin)
    return tuple(offset), tuple(shape)


def _in_order_of_sharding(mesh: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The sharding mesh dimensions in the order of sharding: a strided one after those that it strides."""
    order: list[int] = []
    for mesh_dim in reversed(range(len(mesh))):
        placement = placements[mesh_dim]
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        later = [other for other in order if placements[other].dim == placement.dim]  # type: ignore[attr-defined]
        if not isinstance(placement, _StridedShard):
            order.insert(0, mesh_dim)
            continue
        strided = 1
        for other in later:
            strided *= mesh[other]
        if strided != placement.split_factor:
            raise OwnFailureError(
                f"a part that strides {placement.split_factor} on a mesh of {mesh} is not one box",
                fix="shard with fully_shard over parallelize_module, or another dimension",
            )
        order.append(mesh_dim)
    return order


def chunk_of(tensor: DTensor, name: str) -> ChunkStorageMetadata:
    """`box_of` as DCP's metadata."""
    offset, shape = box_of(tensor, name)
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
