"""Where the part of a DTensor that lies on this rank begins in the whole, and how large it is.

FSDP2 over tensor parallel shards a dimension twice, from the right to the left, and torch 2.13 works the place of an
uneven part out as if a step were taken over the whole dimension: 7 rows on 3 x 2 ranks overlap, or leave a row out. A
checkpoint that was saved so would be complete by its plan and wrong in its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from toolkit.errors import OwnFailureError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole, and shape


def box_of(tensor: DTensor, name: str) -> Box:
    """The box of this rank's part, which must be a part of the mesh.

    Raises:
        OwnFailureError: the part is not what its placements say, or they are of a kind that is not one box.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    offset, shape = _placed(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements), tuple(coordinate))
    found = tuple(tensor.to_local().shape)
    if found != shape and not (0 in found and 0 in shape):
        raise OwnFailureError(
            f"lies as {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}, which gives this rank a part "
            f"of {list(shape)}, but it has one of {list(found)}",
            where=name,
            fix="make the dimension divisible by the ranks that shard it",
        )
    return offset, shape


@lru_cache(maxsize=4096)  # the layers of a model have the same few shapes, and torch takes half a millisecond for each
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
    """As `box_of`, where some dimension is sharded from the right to the left.

    Raises:
        OwnFailureError: a stride is not that of the sharding to its right.
    """
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
    """The mesh dimensions that shard, first the one that sharded first: a strided one after those that it strides."""
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
    """`box_of` in DCP's words."""
    offset, shape = box_of(tensor, name)
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
