"""Computes the offset and shape of this rank's part of a DTensor.

FSDP2 on top of tensor parallelism shards a dimension over two mesh dimensions, from right to left. For uneven parts,
torch 2.13 computes the offset as if it were sharded once: for 7 rows on 3 x 2 ranks, parts overlap or a row is missing.
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

Box = tuple[tuple[int, ...], tuple[int, ...]]  # the offset of a part in the global tensor, and its shape


def box_of(tensor: DTensor, name: str) -> Box:
    """Return the box of this rank's part. Raises OwnFailureError if its placements imply another shape or two boxes."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    offset, shape = _placed(tensor.shape, tensor.device_mesh, tensor.placements, tuple(coordinate))
    local = tensor.to_local().shape
    if local != shape and not (0 in local and 0 in shape):
        raise OwnFailureError(
            f"expected a local part of shape {list(shape)} for {tensor.placements} on a mesh of shape "
            f"{tuple(tensor.device_mesh.shape)}, got {list(local)}",
            where=name,
            fix="make the dimension divisible by the number of ranks that shard it",
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
    """Compute the box of `box_of` for a dimension that is sharded over the mesh dimensions from right to left."""
    offset, shape = [0] * len(whole), list(whole)
    for mesh_dim in _in_order_of_sharding(mesh, placements):
        placement = placements[mesh_dim]
        assert isinstance(placement, (Shard, _StridedShard))
        dim = placement.dim
        length = -(-shape[dim] // mesh[mesh_dim])  # splits as torch.chunk does: the last parts may be short or empty
        begin = min(coordinate[mesh_dim] * length, shape[dim])
        offset[dim] += begin
        shape[dim] = min(length, shape[dim] - begin)
    return tuple(offset), tuple(shape)


def _in_order_of_sharding(mesh: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Return the mesh dimensions that shard a tensor in sharding order: strided ones follow those they stride over."""
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
                f"with split factor {placement.split_factor} on mesh {mesh}, a strided shard is more than one box",
                fix="apply fully_shard after parallelize_module, or shard another dimension",
            )
        order.append(mesh_dim)
    return order


def chunk_of(tensor: DTensor, name: str) -> ChunkStorageMetadata:
    """Return the result of `box_of` as DCP metadata."""
    offset, shape = box_of(tensor, name)
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
