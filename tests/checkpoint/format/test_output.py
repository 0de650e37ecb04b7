"""A disk that ends at any byte of an HDF5 file is an error like any other; HDF5 itself was seen to end the process."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from sampling import sampled

from toolkit.checkpoint.format.index import write_index
from toolkit.checkpoint.format.manifest import FileRecord, Manifest, Piece, TensorRecord
from toolkit.checkpoint.format.shard_layout import StoredPiece, lay_out
from toolkit.checkpoint.saving.shard_writer import write_shard
from toolkit.checkpoint.saving.streamed_shard import stream_shard

PARTS = range(8)


def write_streamed_shard(path: Path) -> None:
    """Pieces of less than a page, which stand between what HDF5 writes itself, and of more."""
    with stream_shard(path) as shard:
        for number in PARTS:
            for count in (number, 1500 + number):
                data = np.full(count, number, "f4")
                shard.write(f"tensor {number}", "float32", [3000], [count], data)


def write_long_index(path: Path) -> None:
    pieces = tuple(Piece("shard-00000-of-00001.h5", (start,), (1,), 0) for start in PARTS)
    tensors = {f"tensor {number}": TensorRecord("float32", (8,), ("x",), pieces) for number in PARTS}
    files = (FileRecord("shard-00000-of-00001.h5", 1, ""),)
    manifest = Manifest(1, 0, 1, "", "", tensors=tensors, files=files)
    write_index(path.parent, manifest).rename(path)


def write_planned_shard(path: Path) -> None:
    pieces = tuple(StoredPiece(f"tensor {number}", "uint8", (5000,), (0,), (5000,)) for number in PARTS)
    lay_out.cache_clear()
    write_shard(path, lay_out(pieces), [memoryview(bytes([number] * 5000)) for number in PARTS])


@pytest.mark.parametrize(
    "write",
    sampled(
        [write_streamed_shard, write_planned_shard, write_long_index], lambda case: case[0] is not write_planned_shard
    ),
)
def test_a_file_may_end_at_any_byte(tmp_path, write):
    whole = tmp_path / "whole.h5"
    write(whole)
    size = whole.stat().st_size
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for limit in range(0, size, 256):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                folder = tmp_path / str(limit)
                folder.mkdir()
                try:
                    write(folder / "x.h5")
                except OSError as error:
                    assert error.errno == errno.EFBIG and str(error.filename).startswith((str(folder), "memory"))
                else:
                    raise AssertionError(f"{limit} of {size} bytes were enough")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with h5py.File(whole) as file:
        assert len(file["tensors"]) == len(PARTS)


def test_a_streamed_shard_file_is_never_written_over(tmp_path):
    write_streamed_shard(tmp_path / "x.h5")
    with pytest.raises(FileExistsError):
        write_streamed_shard(tmp_path / "x.h5")
