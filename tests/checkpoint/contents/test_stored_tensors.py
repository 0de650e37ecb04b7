"""Boxes of stored tensors come out as they went in, however the pieces lie; a damaged block is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint import HDF5StorageWriter
from toolkit.checkpoint.contents.stored_tensors import StoredTensors, intersection, runs
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format.manifest_file import read_manifest

VALUES = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "half": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture
def folder(tmp_path):
    dcp.save(dict(VALUES), storage_writer=HDF5StorageWriter(tmp_path / "step-00000001"), no_dist=True)
    return tmp_path / "step-00000001"


def test_whole_tensors_and_boxes_are_what_was_saved(folder):
    with StoredTensors(folder, read_manifest(folder)) as stored:
        for name, value in VALUES.items():
            expected = value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
            assert np.array_equal(stored.read(name), expected) and stored.read(name).shape == expected.shape
        assert np.array_equal(stored.box("matrix", (1, 2), (3, 4)), VALUES["matrix"][1:4, 2:6].numpy())
        rows = [array for _, array in stored.boxes("matrix", most_bytes=60)]
        assert [len(array) for array in rows] == [2, 2, 1]
        assert np.array_equal(np.concatenate(rows), VALUES["matrix"].numpy())


def test_a_box_of_a_damaged_block_is_refused(folder):
    manifest = read_manifest(folder)
    (piece,) = manifest.tensors["matrix"].pieces
    data = bytearray((folder / piece.file).read_bytes())
    data[piece.byte_offset] ^= 1
    (folder / piece.file).write_bytes(data)
    with StoredTensors(folder, manifest) as stored, pytest.raises(CorruptCheckpointError, match="block 0"):
        stored.read("matrix")


boxes = st.tuples(st.tuples(*[st.integers(0, 6)] * 2), st.tuples(*[st.integers(0, 6)] * 2))


@given(boxes, boxes)
def test_an_intersection_holds_the_elements_that_both_hold(one, other):
    def cells(box):
        (row, column), (rows, columns) = box
        return {(row + i, column + j) for i in range(rows) for j in range(columns)}

    common = intersection(one, other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 100))
@settings(max_examples=100)
def test_parts_follow_one_another_and_none_is_too_large(shape, most_bytes):
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [np.empty(0, int)]
    for offset, extent in runs(shape, 8, most_bytes):
        part = whole[tuple(slice(at, at + count) for at, count in zip(offset, extent, strict=True))]
        assert part.nbytes <= max(8, most_bytes)
        found.append(part.reshape(-1))
    assert np.array_equal(np.concatenate(found), whole.reshape(-1))
