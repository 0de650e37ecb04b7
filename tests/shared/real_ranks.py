"""Real ranks of one machine, and a state that lies on them in every way."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from toolkit.world.facts import World

# Uneven on purpose: 7 rows over 4 ranks, 3 columns over 8, more ranks than rows.
SHAPES = {"even": (16, 8), "odd": (7, 5), "thin": (3, 3), "flat": (13,), "deep": (5, 6, 7)}


def reference(name: str, dtype: torch.dtype, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1000 + step)
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def state(step: int | None, rank: int, size: int) -> dict:
    """All ways to lie on a mesh, with the values of a step, or zeros to load into."""
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    columns = 2 if size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("replicate", "shard"))

    def value(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return reference(name, dtype, step) if step is not None else torch.zeros(SHAPES[name], dtype=dtype)

    laid_out = {"plain": {}, "rows": {}, "columns": {}, "hybrid": {}, "both": {}}
    for name, shape in SHAPES.items():
        last = len(shape) - 1
        laid_out["plain"][name] = value(name, torch.float64)
        laid_out["rows"][name] = distribute_tensor(value(name, torch.bfloat16), line, [Shard(0)])
        laid_out["columns"][name] = distribute_tensor(value(name), line, [Shard(last)])
        laid_out["hybrid"][name] = distribute_tensor(value(name), grid, [Replicate(), Shard(0)])
        laid_out["both"][name] = distribute_tensor(value(name), grid, [Shard(0), Shard(last)])
    own = torch.full((6,), rank if step is not None else 255, dtype=torch.uint8)
    return {**laid_out, "random": {f"rank-{rank:05d}": own}, "lr": 0.5 if step is not None else 0.0}


def assert_is_step(tensors: dict, step: int) -> None:
    for layout in ("plain", "rows", "columns", "hybrid", "both"):
        for name, tensor in tensors[layout].items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, reference(name, whole.dtype, step)), (layout, name)
    assert tensors["lr"] == 0.5


def run_ranks(size: int, work, folder: Path) -> list[dict]:
    """Start real ranks; each writes what it saw to a file."""
    answers = folder / f"answers-{work.__name__}-{size}"
    answers.mkdir()
    # Forks of a server that has imported torch: importing it in each rank would be most of a test's time.
    mp.start_processes(one_rank, (size, work, folder, answers), nprocs=size, start_method="forkserver")
    return [json.loads((answers / str(rank)).read_text()) for rank in range(size)]


def one_rank(rank: int, size: int, work, folder: Path, answers: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{answers}/store", rank=rank, world_size=size)
    world = World(rank, rank, size, size, 0, 1, "here", "cpu", "local", "test", attempt=1)
    (answers / str(rank)).write_text(json.dumps(work(folder, world)))
    dist.destroy_process_group()
