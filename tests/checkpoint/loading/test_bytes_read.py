"""A load reads the bytes that its boxes need, rounded out to digested blocks, and not the whole checkpoint.

What the kernel counts of a process that loads alone as one rank of many: `rchar` of /proc/self/io.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.checkpoint.loading.planner import LoadPlanner

ROWS, COLUMNS = 8192, 1024
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "step-00000001"
    tensors = {name: torch.randn(ROWS, COLUMNS) for name in ("a", "b")} | {"small": torch.ones(4, 4)}
    dcp.save(tensors, storage_writer=HDF5StorageWriter(folder), no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 4), (2, 4), (7, 16)])
def test_a_part_of_the_rows_reads_that_part_of_the_bytes(rank, ranks, saved):
    needed, blocks = bytes_of_rows(saved, ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
    assert needed == 2 * ROWS * COLUMNS * 4 // ranks
    texts = sum((saved / name).stat().st_size for name in (MANIFEST, "shard-00000-of-00001.digest"))
    # The manifest once for its digest and sizes, and what little the process reads beside.
    assert needed <= bytes_read(saved, rank, ranks) <= blocks + 2 * texts + MIB // 16


def bytes_of_rows(folder: Path, first: int, end: int) -> tuple[int, int]:
    """The bytes of these rows of both tensors, and those of the blocks that hold them."""
    manifest = read_manifest(folder)
    touched = set()
    for name in ("a", "b"):
        (piece,) = manifest.tensors[name].pieces
        start, stop = (piece.byte_offset + row * COLUMNS * 4 for row in (first, end))
        touched |= {(piece.file, block) for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))}
    whole = {file: manifest.file(file).size for file, _ in touched}
    held = sum(min(BLOCK_BYTES, whole[file] - block * BLOCK_BYTES) for file, block in touched)
    return 2 * (end - first) * COLUMNS * 4, held


def bytes_read(folder: Path, rank: int, ranks: int) -> int:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(load_as, (folder, rank, ranks))


def load_as(folder: Path, rank: int, ranks: int) -> int:
    """Load as one rank of many; nothing is exchanged in a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {
        name: distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)], src_data_rank=None) for name in ("a", "b")
    }
    load({"small": torch.zeros(4, 4)}, folder)  # imports what a first load imports
    before = _read_so_far()
    load(tensors, folder)
    return _read_so_far() - before


def load(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.load(tensors, storage_reader=HDF5StorageReader(folder), planner=LoadPlanner(()), no_dist=True)


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
