"""Compare loading 1,008 tensors of a language model with toolkit and with safetensors, from memory, in interleaved rounds.

    python benchmarks/checkpoint_small_tensors.py [--cases 1x256 2x256 1x10] [--rounds 7]

Prints one JSON object: by case (ranks x MB) and method the minimum and median in milliseconds until the last rank has
finished, after two rounds of warm-up, and the ratios of toolkit to safetensors. Every method fills the existing tensors
of a model; `safetensors, new tensors` allocates them instead. toolkit also checks the digest of every byte.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from checkpoint_speed import case_of
from checkpoint_speed_ranks import shapes_of, state_of, world_of
from torch.distributed.device_mesh import init_device_mesh

from toolkit.checkpoint import Checkpointer, HDF5StorageReader

WARM_UP = 2
OURS = ("Checkpointer.load", "dcp.load")


def one_rank(rank: int, ranks: int, megabytes: int, rounds: int, folder: str) -> None:
    """Measure one case; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(rank)
    shapes = shapes_of("many", megabytes)
    saved, target = state_of(shapes, mesh, torch.randn), state_of(shapes, mesh, torch.zeros)
    local = {name: tensor.to_local() for name, tensor in target.items()}
    checkpoints = Checkpointer(Path(folder) / "checkpoints", world_of(rank, ranks))
    step = checkpoints.save(1, saved, {})
    own = f"{folder}/{rank}.safetensors"
    safetensors.torch.save_file({name: tensor.to_local() for name, tensor in saved.items()}, own)

    def copied() -> None:
        for name, tensor in safetensors.torch.load_file(own).items():
            local[name].copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        "Checkpointer.load": lambda: checkpoints.load(target),
        "dcp.load": lambda: dcp.load(target, storage_reader=HDF5StorageReader(step)),
        "safetensors": copied,
        "safetensors, new tensors": lambda: safetensors.torch.load_file(own, backend="pread"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + rounds):
        for name, load in ways.items():
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            load()
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(saved[name].to_local(), tensor) for name, tensor in local.items())
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, megabytes: int, rounds: int) -> dict[str, object]:
    """Return the figures of one case."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mp.spawn(one_rank, (ranks, megabytes, rounds, folder), nprocs=ranks)
        seconds: dict[str, list[float]] = json.loads(Path(folder, "results.json").read_text())
    figures = {
        name: {"min_ms": round(min(of) * 1e3, 1), "median_ms": round(statistics.median(of) * 1e3, 1)}
        for name, of in seconds.items()
    }
    ratios = {
        f"{ours} / {theirs}": {
            kind: round(figures[ours][kind] / figures[theirs][kind], 2) for kind in ("min_ms", "median_ms")
        }
        for ours in OURS
        for theirs in seconds
        if theirs not in OURS
    }
    return {"ranks": ranks, "megabytes": megabytes, "tensors": 1008, **figures, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=case_of, default=[(1, 256), (2, 256), (1, 10)])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    cases = [measure(*case, options.rounds) for case in options.cases]
    print(
        json.dumps({"cores": os.cpu_count(), "load_average": load, "rounds": options.rounds, "cases": cases}, indent=1)
    )


if __name__ == "__main__":
    main()
