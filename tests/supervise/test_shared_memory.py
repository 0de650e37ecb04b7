"""What is removed of the shared memory on a node: only what nobody has a use for."""

import mmap
import os
import time
from pathlib import Path

import pytest

from toolkit.supervise import shared_memory
from toolkit.supervise.shared_memory import remove_left_behind


@pytest.fixture
def segment(tmp_path):
    def make(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        return path

    return make


def test_only_segments_of_mpich_that_are_newer_and_unused_go(segment, tmp_path):
    began = time.time()
    left, old, other = (segment(name) for name in ("mpich_shm_1_0", "mpich_shm_2_0", "nccl-abc"))
    os.utime(old, (began - 60, began - 60))
    with segment("mpich_shm_3_0").open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        assert remove_left_behind(began, tmp_path) == [left.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [old.name, "mpich_shm_3_0", other.name]


def test_one_that_is_mapped_a_moment_after_it_was_made_stays(segment, tmp_path, monkeypatch):
    path = segment("mpich_shm_1_0")
    maps = []

    def sleep(_seconds: float) -> None:
        with path.open("r+b") as stream:
            maps.append(mmap.mmap(stream.fileno(), 0))

    monkeypatch.setattr(shared_memory.time, "sleep", sleep)
    assert remove_left_behind(0.0, tmp_path) == []
    assert path.exists()
