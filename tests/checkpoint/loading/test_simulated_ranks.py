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
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.boxes import box_of, strided_box
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.loading.planner import LoadPlanner
from toolkit.checkpoint.saving.plan import SavePlanner
from toolkit.errors import ToolkitError

FEW = [(Layout("hsdp tp", replicate=2, shard=3, tp=2), Layout("fsdp", shard=16))]
MANY = [
    (Layout("hsdp tp", replicate=2, shard=8, tp=4), Layout("fsdp", shard=100)),
    (Layout("fsdp", shard=96), Layout("fsdp tp", shard=16, tp=8)),
    (Layout("hsdp", replicate=16, shard=8), Layout("tp", tp=12)),
]


@pytest.mark.evidence  # a process for each rank takes its time
@pytest.mark.parametrize(("saving", "loading"), [*FEW, *MANY])
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
    with multiprocessing.get_context("forkserver").Pool(2, maxtasksperchild=1) as pool:
        return pool.map(work, list(turns), chunksize=1)


def tensors_on_six(rank: int, rows: int) -> dict[str, Tensor]:
    """Rows as FSDP2 over tensor parallel lays them out on 3 x 2 ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (3, 2))
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    _, shape = strided_box((rows, 5), (3, 2), mesh.get_coordinate(), placements)
    part = torch.full(shape, float(rank))
    return {"x": DTensor.from_local(part, mesh, placements, run_check=False, shape=(rows, 5), stride=(5, 1))}


def refused_by(cases: list[tuple[int, type[DefaultSavePlanner], HDF5StorageWriter]], rank: int) -> list[tuple]:
    """Of each case whether the planner misplaces a rank's part, and what the writer says to it."""
    return [_refused_by(*case, rank) for case in cases]


def _refused_by(rows: int, planner: type[DefaultSavePlanner], writer: HDF5StorageWriter, rank: int) -> tuple[bool, str]:
    planned = planner()
    tensors = tensors_on_six(rank, rows)
    planned.set_up_planner(tensors, is_coordinator=rank == 0)
    plan = planned.finish_plan(planned.create_local_plan())
    offset, shape = box_of(tensors["x"], "x")
    is_wrong = any(
        item.tensor_data.chunk.sizes != torch.Size(shape)
        or (0 not in shape and item.tensor_data.chunk.offsets != torch.Size(offset))
        for item in plan.items
    )
    given = writer.prepare_global_plan([plan] * 6)[rank]
    try:
        writer.write_data(given, planned).wait()
    except ToolkitError as error:
        return is_wrong, str(error)
    return is_wrong, ""


def test_parts_that_a_planner_misplaces_are_refused(tmp_path):
    cases = []
    for rows in (7, 9):
        for planner in (DefaultSavePlanner, SavePlanner):
            writer = HDF5StorageWriter(tmp_path / f"{rows}-{planner.__name__}" / "step-00000001")
            writer.set_up_storage_writer(True)
            cases.append((rows, planner, writer))
    misplaced = 0
    for rank, answers in enumerate(play(partial(refused_by, cases), range(6))):
        for (rows, planner, _), (is_wrong, said) in zip(cases, answers, strict=True):
            assert bool(said) == is_wrong, (rows, planner, rank, said)
            misplaced += is_wrong
            if said:
                assert said.startswith("x: the plan expects a part of shape [") and "SavePlanner()" in said
    assert misplaced


def plan_of_six(rows: int, rank: int) -> SavePlan:
    planner = SavePlanner()
    planner.set_up_planner(tensors_on_six(rank, rows), is_coordinator=rank == 0)
    return planner.create_local_plan()


def test_a_rank_without_rows_takes_none_from_the_others():
    """Its empty part begins where another rank's begins, and of two parts at one place only one is stored."""
    rows = 2
    plans = play(partial(plan_of_six, rows), range(6))
    shares, _ = SavePlanner().create_global_plan(plans)
    stored = [item.tensor_data.chunk.sizes[0] for share in shares for item in share.items]
    assert sum(stored) == rows and 0 not in stored


def rows_of(count: int) -> Tensor:
    return torch.arange(count * 5, dtype=torch.float32).reshape(count, 5) + 1


def loaded_by(rows: int, folder: Path, rank: int) -> str:
    """What the reader says to the plan of torch's planner; what is not refused, and our planner's, are the own rows."""
    tensors, said = tensors_on_six(rank, rows), ""
    (first, _), (count, _) = box_of(tensors["x"], "x")
    reader = HDF5StorageReader(folder)
    for planner in (LoadPlanner(()), DefaultLoadPlanner()):
        tensors["x"].to_local().zero_()
        planner.set_up_planner(tensors, reader.read_metadata(), is_coordinator=rank == 0)
        try:
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except ToolkitError as error:
            assert not isinstance(planner, LoadPlanner), error
            said = str(error)
        else:
            own = rows_of(rows)[first : first + count]
            assert torch.equal(tensors["x"].to_local(), own), f"rank {rank} has others' rows"
    return said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_that_a_planner_would_read_from_elsewhere_are_refused(tmp_path):
    rows, folder = 7, tmp_path / "step-00000001"
    dcp.save({"x": rows_of(rows)}, storage_writer=HDF5StorageWriter(folder), no_dist=True)
    refused = [said for said in play(partial(loaded_by, rows, folder), range(6)) if said]
    assert refused
    assert all("a wrong offset for this rank's part" in said and "LoadPlanner(())" in said for said in refused)


def boxes_in_turn(ranks: tuple[int, ...]) -> list[int]:
    """Where the part of a process begins that is one rank, and then, in another group, another one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begins = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
        begins.append(box_of(part, "x")[0][0])
        dist.destroy_process_group()
    return begins


def test_a_process_that_is_another_rank_from_now_on_has_that_ranks_part():
    assert play(boxes_in_turn, [(0, 1, 0)]) == [[0, 3, 0]]
