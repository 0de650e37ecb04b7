"""Where the parts of a dimension lie that is sharded twice, from the right to the left."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from toolkit.checkpoint.boxes import strided_box
from toolkit.errors import OwnFailureError


def chunks(rows: range, count: int) -> list[range]:
    length = -(-len(rows) // count) or 1
    return [rows[place * length : (place + 1) * length] for place in range(count)]


def test_parts_are_those_of_chunks_of_chunks_for_all_small_sizes():
    wrong_in_torch = 0
    for rows, outer, inner in itertools.product(range(1, 40), range(2, 6), range(2, 6)):
        placements = (_StridedShard(0, split_factor=inner), Shard(0))
        parts = [chunks(part, outer) for part in chunks(range(rows), inner)]
        for place in itertools.product(range(outer), range(inner)):
            true = parts[place[1]][place[0]]
            (offset,), (length,) = strided_box((rows,), (outer, inner), place, placements)
            assert length == len(true) and (not true or offset == true.start), (rows, outer, inner, place)
            (size,), (begin,) = _compute_local_shape_and_global_offset((rows,), (outer, inner), list(place), placements)
            wrong_in_torch += size != len(true) or (bool(true) and begin != true.start)
    assert wrong_in_torch  # else `boxes` is no longer needed


def test_copies_and_other_dimensions_keep_out_of_it():
    mesh, placements = (2, 3, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0), Shard(1))
    # Rows 4..6 of 7 are the second half; its three parts are one row each.
    assert strided_box((7, 5), mesh, (1, 2, 1, 0), placements) == ((6, 0), (1, 3))
    assert strided_box((7, 5), mesh, (0, 0, 0, 1), placements) == ((0, 3), (2, 2))


def test_a_stride_that_is_no_sharding_is_refused():
    with pytest.raises(OwnFailureError, match="a strided shard is more than one box"):
        strided_box((8,), (2, 2), (0, 0), (_StridedShard(0, split_factor=4), Shard(0)))
