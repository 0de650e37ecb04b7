"""One shard file for the ranks of a node: the same bits, whoever shares a node, and one error for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

NODES = {"in a row": [0, 0, 1, 1], "cyclic": [0, 1, 0, 1], "uneven": [0, 0, 0, 5]}
ROWS = 700_003  # several blocks, of which ranks share some


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, 3, generator=generator) for name in ("a", "b")}


def one_rank(rank: int, nodes: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(nodes))
    mesh = init_device_mesh("cpu", (len(nodes),))
    on_node = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    world = World(
        rank, on_node.index(rank), len(nodes), len(on_node), nodes[rank], 2, "here", "cpu", "local", "test", attempt=0
    )
    checkpoints = Checkpointer(folder / "checkpoints", world, keep_last=1, aggregate="node")

    def state(step: int) -> dict[str, torch.Tensor]:
        sharded = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole(step).items()}
        return {**sharded, f"own-{rank}": torch.full((rank + 1,), step)}

    for step in (1, 2):
        checkpoints.save(step, state(step), {})
    checkpoints.save_in_background(3, state(3), {})  # over the files of step 1
    checkpoints.wait()
    broken = state(4)
    if rank == 3:
        broken["own-3"] = torch.eye(3).to_sparse()
    with pytest.raises(ToolkitError, match=r"rank 3: own-3: tensor layout torch.sparse_coo cannot be stored"):
        checkpoints.save(4, broken, {})
    wanted = {name: torch.zeros(ROWS, 3) for name in whole(0)}
    assert checkpoints.load(wanted).step == 3
    assert all(torch.equal(wanted[name], value) for name, value in whole(3).items())
    dist.destroy_process_group()


@pytest.mark.parametrize("nodes", NODES.values(), ids=list(NODES))
def test_the_ranks_of_a_node_share_a_file(tmp_path, nodes):
    mp.start_processes(one_rank, (nodes, tmp_path), nprocs=len(nodes), start_method="forkserver")
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert sorted(path.name for path in folder.glob("*.h5")) == [
        "index.h5", "shard-00000-of-00002.h5", "shard-00001-of-00002.h5"
    ]  # fmt: skip
    assert verify_fully(folder) == (read_manifest(folder), [])
    # Nobody's mesh: one process takes it all.
    alone = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=1)
    wanted = {name: torch.zeros(ROWS, 3) for name in whole(0)} | {"own-2": torch.zeros(3, dtype=torch.int64)}
    Checkpointer(tmp_path / "checkpoints", alone).load(wanted)
    assert all(torch.equal(wanted[name], value) for name, value in whole(3).items())
    assert wanted["own-2"].tolist() == [3, 3, 3]
