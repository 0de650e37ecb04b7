"""The mesh as torch sees it, on real ranks that a launcher dealt to nodes in turn: every group in the mesh's order."""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # each rank would import it when it first redistributes a tensor
import torch.distributed as dist
import torch.multiprocessing as mp
from clusters_of_ranks import in_turn, topology_of_ranks
from real_ranks import one_rank
from sampling import sampled, selected
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel import mesh as mesh_module
from toolkit.parallel.mesh import Mesh, make_mesh
from toolkit.topology.placement import groups_of
from toolkit.world.facts import World

PATIENCE_S = 45
MESHES = {
    4: [{"tp": 2}, {"shard": 2, "tp": 2}, {"pp": 2}, {"replicate": 4}, {"shard": 4, "ep": 2}, {"cp": 2, "shard": 2}],
    8: [{"tp": 2, "shard": 2}, {"pp": 2, "cp": 2, "tp": 2}, {"shard": 4, "ep": 2}, {"cp": 2, "shard": 2}, {"tp": 4}],
}


def mesh_of(world: World, sizes: dict[str, Any]) -> Mesh:
    """Ranks dealt in turn to nodes of two ranks; those of a node are in one clique."""
    each = min(world.size, 2)
    topology = topology_of_ranks("dgx-1", [world.size // each], each, in_turn(world.size // each, each))
    restart = SimpleNamespace(collective_timeout_s=PATIENCE_S)
    return make_mesh(world, SimpleNamespace(parallel=ParallelTable(**sizes), restart=restart), topology)


def gathered(value: int, group: dist.ProcessGroup | None) -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor([value]), group=group)
    return [int(part) for part in parts]


def check_groups(mesh: Mesh, rank: int) -> None:
    """Each group holds whom the mesh says, in its order, and sums over them."""
    ranks = mesh.placement.mesh
    singles = [("pp",), ("replicate",), ("shard",), ("cp",), ("tp",)]
    for names in (*singles, ("replicate", "shard"), ("shard", "cp"), ("ep",)):
        groups = groups_of(ranks, "ep" if names == ("ep",) else names, mesh.sizes["ep"])
        (expected,) = (group.tolist() for group in groups if rank in group)
        group = mesh.group(*names)
        if len(expected) == 1:
            assert group is None, names
            continue
        assert gathered(rank, group) == expected, names
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2.0**one for one in expected), names
        if names in singles:
            place = mesh.place[names[0]]
            assert mesh.device_mesh.get_local_rank(names[0]) == place == expected.index(rank), names
            assert mesh.device_mesh.get_group(names[0]) is group
    assert ranks[tuple(mesh.place.values())] == rank
    if mesh.data_size > 1:
        assert gathered(mesh.data_rank, mesh.group("replicate", "shard")) == list(range(mesh.data_size))


def check_pieces(device_mesh: DeviceMesh) -> None:
    """A tensor cut over all of a mesh comes together as it was, and each piece is where torch thinks."""
    whole = torch.arange(64.0 * 6).reshape(64, 6)
    rows = [Shard(0)] * device_mesh.ndim
    cut = distribute_tensor(whole, device_mesh, rows)
    assert torch.equal(cut.full_tensor(), whole)
    (count, _), (first, _) = compute_local_shape_and_global_offset(whole.shape, device_mesh, rows)
    assert torch.equal(cut.to_local(), whole[first : first + count])
    turned = cut.redistribute(device_mesh, [Shard(1 - at % 2) for at in range(device_mesh.ndim)])
    assert torch.equal(turned.full_tensor(), whole)


def every_mesh(_: Path, world: World) -> list[list[int]]:
    orders = []
    for sizes in MESHES[world.size]:
        mesh = mesh_of(world, sizes)
        check_groups(mesh, world.rank)
        for device_mesh in (mesh.device_mesh, mesh.merged("shard", "cp"), mesh.merged("replicate", "shard")):
            check_pieces(device_mesh)
        orders.append(mesh.placement.mesh.ravel().tolist())
    return orders


def sharded_copies(_: Path, world: World) -> None:
    """HSDP: the gradient of the whole batch, whoever takes which share, and parameters as they were."""
    mesh = mesh_of(world, {"replicate": 2, "shard": 2})
    assert mesh.placement.packed
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    alone, model = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)
    model.load_state_dict(alone.state_dict())
    fully_shard(model, mesh=mesh.among("replicate", "shard"))
    model(batch.chunk(mesh.data_size)[mesh.data_rank]).square().mean().backward()
    alone(batch).square().mean().backward()
    for (name, parameter), one in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, msg=name)
        assert torch.equal(parameter.full_tensor(), one)


def said(make) -> tuple[Mesh, str]:
    stderr, sys.stderr = sys.stderr, StringIO()
    try:
        return make(), sys.stderr.getvalue()
    finally:
        sys.stderr = stderr


def lines(_: Path, world: World) -> list[Any]:
    mesh, line = said(lambda: mesh_of(world, {"tp": 2}))
    backend = mesh.group("tp")._get_backend(torch.device("cpu"))
    mesh_module._KEEPS_ORDER = False  # as torch 2.11
    upward, other_line = said(lambda: mesh_of(world, {"tp": 2}))
    assert upward.placement.mesh.ravel().tolist() == [0, 1, 2, 3]
    mesh, _ = said(lambda: mesh_of(world, {}))
    assert (
        mesh.group("replicate") is mesh.group("replicate", "shard") is dist.group.WORLD
        and mesh.among("shard", "cp") is None
    )
    return [line, other_line, backend.options._timeout.total_seconds()]


def alone(_: Path, world: World) -> list[Any]:
    mesh = mesh_of(world, {})
    assert mesh.group("replicate") is None and mesh.group("tp") is None
    for ask, names, fix in (
        (mesh.group, ("dp",), "'pp', 'replicate', 'shard', 'cp', 'tp'"),
        (mesh.among, ("tp", "shard"), "'shard', 'tp'"),
        (mesh.merged, ("shard", "tp"), "'shard', 'cp', 'tp'"),
    ):
        with pytest.raises(ToolkitError, match=f"the mesh has no .*use {fix}, each once"):
            ask(*names)
    return [list(mesh.device_mesh.mesh_dim_names), list(mesh.device_mesh.shape), mesh.data_rank, mesh.data_size]


CASES = [(every_mesh, 4), (every_mesh, 8), (sharded_copies, 4), (lines, 4), (alone, 1)]


def run_cases(folder: Path, cases: list[tuple[Any, int]]) -> None:
    """In a process that has imported torch once: ranks are forks of it."""
    for work, size in cases:
        answers = folder / f"{work.__name__}-{size}"
        answers.mkdir()
        try:
            mp.start_processes(one_rank, (size, work, folder, answers), nprocs=size, start_method="fork")
        except Exception:  # noqa: BLE001 - told to the test, which fails with it
            (answers / "failure").write_text(traceback.format_exc())


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """`answers(work, size)` are what the ranks of a case returned, as JSON."""
    folder = tmp_path_factory.mktemp("mesh")
    sizes = [
        case["size"] for case in selected(request, "test_every_group_is_the_meshs_and_tensors_lie_where_torch_thinks")
    ]
    cases = [case for case in CASES if case[0] is not every_mesh or case[1] in sizes]
    process = multiprocessing.get_context("spawn").Process(target=run_cases, args=(folder, cases))
    process.start()
    process.join()

    def of(work, size: int) -> list[str]:
        failure = folder / f"{work.__name__}-{size}" / "failure"
        assert not failure.exists(), failure.read_text()
        return [(folder / f"{work.__name__}-{size}" / str(rank)).read_text() for rank in range(size)]

    return of


@pytest.mark.parametrize("size", sampled([4, 8], lambda case: case[0] == 4))
def test_every_group_is_the_meshs_and_tensors_lie_where_torch_thinks(answers, size):
    orders, *others = map(json.loads, answers(every_mesh, size))
    assert all(other == orders for other in others), "all ranks agree"
    assert len([order for order in orders if order != sorted(order)]) >= 2, "of ranks that stand as launched"


def test_sharded_copies_train_on_ranks_that_were_placed(answers):
    answers(sharded_copies, 4)


def test_rank_0_says_how_ranks_stand_and_groups_wait_as_long_as_the_job_says(answers):
    (line, other_line, patience_s), *others = map(json.loads, answers(lines, 4))
    assert line.startswith(
        "mesh: replicate 2 x tp 2; ranks placed (replicate in leaf, tp in clique): predicted to save "
    )
    assert line.count("\n") == 1 and patience_s == PATIENCE_S
    assert "; ranks as launched: this torch sorts the ranks of a group; torch 2.13 would save " in other_line
    assert all(other[:2] == ["", ""] for other in others)


def test_a_lone_rank_has_a_mesh_of_one_copy(answers):
    assert json.loads(answers(alone, 1)[0]) == [["replicate"], [1], 0, 1]
