from __future__ import annotations

import h5py
import numpy as np
import pytest

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.train.data import BrokenRecordError, HDF5Source

ROWS = 50


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "samples.h5", "w") as file:
        file["plain"] = np.arange(ROWS * 3).reshape(ROWS, 3)
        file.create_dataset("chunked", data=np.arange(ROWS, dtype=np.float32), chunks=(7,), compression="gzip")
        file["short"] = np.arange(3)
        file["words"] = ["a"] * ROWS
        file["one"] = 1
    return tmp_path / "samples.h5"


def test_rows_come_in_the_order_that_was_asked_for_also_twice(path):
    source = HDF5Source(path, ["plain", "chunked"])
    assert source.count == ROWS
    positions = np.random.default_rng(0).integers(0, ROWS, 40)
    plain, chunked = source.take(positions)
    assert plain.tolist() == [[3 * row, 3 * row + 1, 3 * row + 2] for row in positions]
    assert chunked.tolist() == positions.tolist()
    assert HDF5Source(path, "chunked").take(np.array([3, 1])).tolist() == [3.0, 1.0]


def test_each_chunk_is_read_once_and_what_touches_together(path, monkeypatch):
    source = HDF5Source(path, ["chunked"])
    read = []
    plain = h5py.Dataset.__getitem__
    direct = h5py.Dataset.read_direct
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda self, place: read.append((place.start, place.stop)) or plain(self, place))  # fmt: skip
    monkeypatch.setattr(
        h5py.Dataset, "read_direct", lambda self, to, what, where: read.append((what.start, what.stop)) or direct(self, to, what, where)
    )  # fmt: skip
    source.take(np.array([30, 0, 5, 6, 7, 8, 40]))
    # 0..6 are one chunk, 7..13 the next, which touches it; 30 and 40 are of others.
    assert read == [(0, 9), (30, 31), (40, 41)]


def test_what_is_not_there_is_named(path, tmp_path):
    with pytest.raises(NotFoundError, match=r"the file has no dataset 'plane'. Fix: pass 'plain'"):
        HDF5Source(path, ["plane"])
    with pytest.raises(ToolkitError, match=r"the same number of samples, 1 or more, got 50 \(plain\), 3 \(short\)"):
        HDF5Source(path, ["plain", "short"])
    for name in ("words", "one"):
        with pytest.raises(ToolkitError, match="expected an array of numbers, got"):
            HDF5Source(path, [name])
    with pytest.raises(NotFoundError, match="file not found"):
        HDF5Source(tmp_path / "none.h5", ["a"])
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(ToolkitError, match="cannot open the file"):
        HDF5Source(tmp_path / "text.h5", ["a"])


def test_a_chunk_that_cannot_be_read_is_named_or_left_out(path):
    with h5py.File(path, "r") as file:
        chunk = file["chunked"].id.get_chunk_info(3)  # rows 21 to 27
    with path.open("r+b") as stream:
        stream.seek(chunk.byte_offset)
        stream.write(bytes(chunk.size))
    with pytest.raises(BrokenRecordError) as told:
        HDF5Source(path, ["chunked"]).take(np.array([1, 22, 40]))
    assert told.value.where == f"{path}:/chunked[22]"
    source = HDF5Source(path, ["chunked"], broken="skip")
    assert source.take(np.array([1, 22, 40])).tolist() == [1, 28, 40]
    assert len(source.drain_skips()) == 1
