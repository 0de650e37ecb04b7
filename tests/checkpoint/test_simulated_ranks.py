"""More ranks than this machine runs: a process plays each in its turn, with torch's fake process group.

Nothing is exchanged in a fake group, so what is played is what needs no exchange: the parts that fully_shard and
parallelize_module give to rank R of N, DCP's local plan of R, the global plan over all local ones, and R's own writing
and reading of real files. The collectives that carry the plans are real in `test_any_to_any` alone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import Layout, Model
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.boxes import box_of
from toolkit.checkpoint.load_planner import LoadPlanner
from toolkit.checkpoint.save_planner import SavePlanner
from toolkit.checkpoint.verify import verify_fully

FEW = [(Layout("hsdp tp", replicate=2, shard=3, tp=2), Layout("fsdp", shard=16))]
MANY = [
    (Layout("hsdp tp", replicate=2, shard=8, tp=4), Layout("fsdp", shard=100)),
    (Layout("fsdp", shard=96), Layout("fsdp tp", shard=16, tp=8)),
    (Layout("hsdp", replicate=16, shard=8), Layout("tp", tp=12)),
]


@pytest.mark.parametrize(
    ("saving", "loading"), [*FEW, *(pytest.param(*pair, marks=pytest.mark.evidence) for pair in MANY)]
)
@pytest.mark.timeout(1800)
def test_many_ranks_save_and_many_others_load(saving, loading, tmp_path):
    folder = tmp_path / "step-00000001"
    save_as(saving, folder)
    manifest, problems = verify_fully(folder)
    assert not problems
    writers = {piece.file for record in manifest.tensors.values() for piece in record.pieces}
    assert len(writers) > 8  # of the copies some write nothing
    whole = Model().state_dict()
    dcp.load(whole, storage_reader=HDF5StorageReader(folder), no_dist=True)
    assert all(torch.equal(whole[name], tensor) for name, tensor in reference().items())
    assert [found for found in play(partial(differing, loading, folder), range(loading.ranks)) if found] == []


def save_as(layout: Layout, folder: Path) -> None:
    """What `dcp.save` does on all ranks."""
    plans: list[SavePlan] = play(partial(local_plan, layout), range(layout.ranks))
    writer = HDF5StorageWriter(folder, step=1)
    writer.set_up_storage_writer(True)
    plans, metadata = SavePlanner().create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, play(partial(written, layout, folder), enumerate(plans)))


def reference() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Model().state_dict()


def tensors_as(layout: Layout, rank: int, seed: int) -> dict[str, Tensor]:
    """The model's tensors as they lie on one rank of a layout."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    torch.manual_seed(seed)
    return get_model_state_dict(layout.place(Model()))


def planner_as(layout: Layout, rank: int) -> SavePlanner:
    planner = SavePlanner()
    planner.set_up_planner(tensors_as(layout, rank, seed=0), is_coordinator=rank == 0)
    return planner


def local_plan(layout: Layout, rank: int) -> SavePlan:
    return planner_as(layout, rank).create_local_plan()


def written(layout: Layout, folder: Path, given: tuple[int, SavePlan]) -> list[Any]:
    rank, plan = given
    planner = planner_as(layout, rank)
    planner.create_local_plan()
    return HDF5StorageWriter(folder, step=1).write_data(planner.finish_plan(plan), planner).wait()


def differing(layout: Layout, folder: Path, rank: int) -> list[str]:
    """What a rank loads, beginning with other weights, and finds to be other than its part of the whole."""
    tensors = tensors_as(layout, rank, seed=1)
    # DCP alone would ask the group whether ranks agree.
    dcp.load(tensors, storage_reader=HDF5StorageReader(folder), planner=LoadPlanner(()), no_dist=True)
    found = []
    for name, whole in reference().items():
        tensor = tensors[name]
        part, expected = tensor, whole
        if isinstance(tensor, DTensor):
            offset, shape = box_of(tensor, name)
            part = tensor.to_local()
            expected = whole[tuple(slice(at, at + count) for at, count in zip(offset, shape, strict=True))]
        if not (part.numel() == expected.numel() == 0 or torch.equal(part, expected)):
            found.append(f"rank {rank}: {name}")
    return found


def play(work: Callable[[Any], Any], turns: Iterable[Any]) -> list[Any]:
    """The answers of a new process for each turn: torch remembers the rank that a process was."""
    multiprocessing.set_forkserver_preload(["toolkit.train.state", "torch.distributed.tensor.parallel", "layouts"])
    with multiprocessing.get_context("forkserver").Pool(2, maxtasksperchild=1) as pool:
        return pool.map(work, list(turns), chunksize=1)
