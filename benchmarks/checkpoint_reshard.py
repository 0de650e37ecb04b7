"""Compare the time to load a checkpoint on other ranks, or sharded along another dimension, with loading it unchanged.

Prints one JSON object: medians in seconds for toolkit ("ours") and DCP's own format; the ratio of each target to
`same mesh` within each format; and the ratio of ours to DCP (below 1 is faster). Every loaded state is compared bit by
bit with the saved state. Files are read from the page cache.

    python benchmarks/checkpoint_reshard.py [--mib 256] [--ranks-from 4] [--ranks-to 2] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter

STORAGE = {"ours": (HDF5StorageWriter, HDF5StorageReader), "dcp": (dcp.FileSystemWriter, dcp.FileSystemReader)}
TENSORS, COLUMNS = 16, 1024


@dataclass(frozen=True)
class Way:
    """A sharding of the state over the ranks of `group`. `expected` contains this rank's shards."""

    name: str
    group: dist.ProcessGroup
    state: dict[str, DTensor]
    expected: dict[str, Tensor]

    @property
    def takes_part(self) -> bool:
        return bool(self.state)


def way(name: str, ranks: int, dimension: int, mib: int) -> Way:
    """Create float32 tensors of `mib` MiB in total, the same for every sharding; empty on ranks outside the group."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return Way(name, group, {}, {})
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    state = {}
    for number in range(TENSORS):
        torch.manual_seed(number)
        whole = torch.randn(mib * 1024 * 1024 // TENSORS // 4 // COLUMNS, COLUMNS)
        state[f"layer.{number}"] = distribute_tensor(whole, mesh, [Shard(dimension)], src_data_rank=None)
    return Way(name, group, state, {key: tensor.to_local().clone() for key, tensor in state.items()})


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def load(way: Way, which: str, path: Path) -> float:
    for tensor in way.state.values():
        tensor.to_local().zero_()

    def work() -> None:
        if way.takes_part:
            dcp.load(way.state, storage_reader=STORAGE[which][1](path), process_group=way.group)

    took = seconds(work)
    assert all(torch.equal(way.state[key].to_local(), part) for key, part in way.expected.items()), (way.name, which)
    return took


def one_rank(rank: int, options: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = max(options.ranks_from, options.ranks_to)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    ways = [
        way("same mesh", options.ranks_from, 0, options.mib),
        way("other ranks", options.ranks_to, 0, options.mib),
        way("other dimension", options.ranks_from, 1, options.mib),
    ]
    for which, (writer, _) in STORAGE.items():
        if ways[0].takes_part:
            dcp.save(ways[0].state, storage_writer=writer(folder / which), process_group=ways[0].group)
    took: dict[str, list[float]] = {f"{which} {one.name}": [] for one in ways for which in STORAGE}
    for number in range(options.rounds + 1):
        for one in ways:
            for which in STORAGE:
                load_s = load(one, which, folder / which)
                if number:  # the first round warms up
                    took[f"{which} {one.name}"].append(load_s)
    if rank == 0:
        print(json.dumps(report(options, took)))
    dist.destroy_process_group()


def report(options: argparse.Namespace, took: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in took.items()}

    def ratio(one: str, other: str) -> float:
        return round(medians[one] / medians[other], 3)

    others = ("other ranks", "other dimension")
    return {
        "mib": options.mib,
        "ranks_from": options.ranks_from,
        "ranks_to": options.ranks_to,
        "rounds": options.rounds,
        "median_s": {name: round(value, 4) for name, value in medians.items()},
        "to_same_mesh": {f"{which} {name}": ratio(f"{which} {name}", f"{which} same mesh") for name in others for which in STORAGE},
        "ours_to_dcp": {name: ratio(f"ours {name}", f"dcp {name}") for name in ("same mesh", *others)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--ranks-from", type=int, default=4)
    parser.add_argument("--ranks-to", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(one_rank, (options, Path(folder)), nprocs=max(options.ranks_from, options.ranks_to))


if __name__ == "__main__":
    main()
