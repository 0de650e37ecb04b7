"""Saving and loading 256 MiB on 2 ranks: HDF5 storage against DCP's own files, same state, interleaved.

Prints one JSON object with the medians in seconds and the ratios (ours / DCP's; below 1 is faster). Ours digests
every byte when it saves and checks every digest when it loads; DCP's own files have no digests.

    python benchmarks/checkpoint_save_load.py [--mib 256] [--ranks 2] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter

STORAGE = {"ours": (HDF5StorageWriter, HDF5StorageReader), "dcp": (dcp.FileSystemWriter, dcp.FileSystemReader)}


def state(mib: int, fill: float) -> dict[str, torch.Tensor]:
    """16 sharded float32 tensors of together `mib` MiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = mib * 1024 * 1024 // 16 // 4 // 1024
    torch.manual_seed(0)
    return {
        f"layer.{number}": distribute_tensor(torch.randn(rows, 1024) * fill, mesh, [Shard(0)]) for number in range(16)
    }


def seconds(work: object) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()  # type: ignore[operator]
    dist.barrier()
    return time.perf_counter() - start


def one_rank(rank: int, options: argparse.Namespace, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    saved, loaded = state(options.mib, 1.0), state(options.mib, 0.0)
    took: dict[str, list[float]] = {f"{which} {what}": [] for which in STORAGE for what in ("save", "load")}
    for number in range(options.rounds + 1):
        for which, (writer, reader) in STORAGE.items():
            path = folder / f"{which}-{number}"
            save_s = seconds(lambda: dcp.save(saved, storage_writer=writer(path)))  # noqa: B023
            load_s = seconds(lambda: dcp.load(loaded, storage_reader=reader(path)))  # noqa: B023
            for name in saved:
                assert torch.equal(saved[name].to_local(), loaded[name].to_local())
                loaded[name].to_local().zero_()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            if number:  # the first round warms up
                took[f"{which} save"].append(save_s)
                took[f"{which} load"].append(load_s)
    if rank == 0:
        print(json.dumps(report(options, took)))
    dist.destroy_process_group()


def report(options: argparse.Namespace, took: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: round(statistics.median(values), 4) for name, values in took.items()}
    return {
        "mib": options.mib,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "median_s": medians,
        "save_ratio": round(medians["ours save"] / medians["dcp save"], 3),
        "load_ratio": round(medians["ours load"] / medians["dcp load"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--port", type=int, default=29577)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(one_rank, (options, Path(folder)), nprocs=options.ranks)


if __name__ == "__main__":
    main()
