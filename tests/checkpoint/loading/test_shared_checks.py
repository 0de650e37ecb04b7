"""Each block is checked once on a node, and what one rank finds keeps all of them from the tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from real_ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.checkpoint.loading.shard_reader import ShardReader
from toolkit.checkpoint.loading.shared_checks import Touched, shares_of_checks
from toolkit.world.facts import World

BLOCKS, COLUMNS = 4, 1024
ROWS = BLOCKS * BLOCK_BYTES // COLUMNS // 4  # of float32; every block holds something of every column


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xy"), st.sets(st.integers(0, 9)))),
        min_size=1,
        max_size=9,
    )
)
def test_every_block_that_a_node_touches_is_checked_by_one_of_its_ranks(of_ranks):
    shares = shares_of_checks([Touched(node, blocks) for node, blocks in of_ranks])
    for node in {node for node, _ in of_ranks}:
        checked: list[tuple[str, int]] = []
        touched: set[tuple[str, int]] = set()
        for (place, blocks), others in zip(of_ranks, shares, strict=True):
            if place == node:
                checked += [(file, b) for file in blocks for b in blocks[file] - set(others.get(file, ()))]
                touched |= {(file, block) for file in blocks for block in blocks[file]}
        assert sorted(checked) == sorted(touched)


def columns_of(value: torch.Tensor, world: World) -> dict:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    return {"x": distribute_tensor(value, mesh, [Shard(1)], src_data_rank=None)}


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def blocks_checked(folder: Path, world: World) -> list[int]:
    """Load by plain DCP; the blocks that this rank checks."""
    checked: list[int] = []
    read_and_check = ShardReader._read_and_check

    def noting(self, block, *rest):
        checked.append(block)
        return read_and_check(self, block, *rest)

    ShardReader._read_and_check = noting
    target = columns_of(torch.zeros(ROWS, COLUMNS), world)
    dcp.load(target, storage_reader=HDF5StorageReader(folder / "step-00000001"))
    assert torch.equal(target["x"].to_local(), columns_of(whole(), world)["x"].to_local())
    return checked


def damages_heard(folder: Path, world: World) -> list[int]:
    """Load copies of which one block each is damaged; those that this rank hears of."""
    heard = []
    for block in range(BLOCKS):
        target = columns_of(torch.zeros(ROWS, COLUMNS), world)
        try:
            dcp.load(target, storage_reader=HDF5StorageReader(folder / f"damaged-{block}" / "step-00000001"))
        except CheckpointException as error:
            heard += [block] * (f"block {block} " in str(error))
    return heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint, and copies of it with one damaged block each."""
    folder: Path = tmp_path_factory.mktemp("shared")
    good = folder / "step-00000001"
    dcp.save({"x": whole()}, storage_writer=HDF5StorageWriter(good), no_dist=True)
    for block in range(BLOCKS):
        copy = folder / f"damaged-{block}" / good.name
        shutil.copytree(good, copy)
        with next(copy.glob("shard-*.h5")).open("r+b") as file:
            file.seek(block * BLOCK_BYTES + BLOCK_BYTES // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_checks_each_block_on_one_rank(folder):
    found = run_ranks(2, blocks_checked, folder)
    assert sorted(found[0] + found[1]) == list(range(BLOCKS + 1)) and abs(len(found[0]) - len(found[1])) <= 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_block_that_another_rank_checks_is_refused_on_every_rank(folder):
    assert run_ranks(2, damages_heard, folder) == [list(range(BLOCKS))] * 2
