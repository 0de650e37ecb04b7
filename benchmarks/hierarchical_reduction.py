"""Compare flat and hierarchical all-reduce of one gradient, with the same tensor on the same ranks, interleaved.

Run it on two or more nodes with two or more ranks each:

    srun -N4 --ntasks-per-node=2 python benchmarks/hierarchical_reduction.py [--mb 20] [--rounds 5]

Rank 0 prints one JSON object: median seconds of the slowest rank, and the ratio (ours / flat; below 1 is faster).
`stages` are the seconds of each stage per reduction on rank 0. Stages overlap, so their sum exceeds the total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from toolkit.comm.hierarchical import SEGMENT_BYTES, HierarchicalReducer
from toolkit.topology.gather import gather_topology
from toolkit.topology.groups import plan_reduction
from toolkit.world.discover import discover
from toolkit.world.rendezvous import start_groups


def slowest(reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Return the seconds that the slowest rank needs."""
    dist.barrier()
    start = time.monotonic()
    reduce(tensor)
    seconds = torch.tensor([time.monotonic() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    """Measure both methods, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=20.0, help="size of the gradient in MB, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segment-mib", type=float, default=SEGMENT_BYTES / 2**20)
    options = parser.parse_args()

    torch.set_num_threads(1)
    world = discover()
    start_groups(world)
    plan = plan_reduction(gather_topology(world), "hierarchical")
    reducer = HierarchicalReducer(plan, segment_bytes=int(options.segment_mib * 2**20))
    gradient = torch.randn(int(options.mb * 1e6 / 4))
    seconds: dict[str, list[float]] = {"flat": [], "hierarchical": []}
    ways = {"flat": dist.all_reduce, "hierarchical": reducer.all_reduce}
    for measured in range(options.rounds + 1):
        for name, reduce in ways.items():
            taken = slowest(reduce, gradient.clone())
            if measured:  # the first round opens connections, and is not counted
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if world.rank == 0:
        stages = {kind: count.seconds / (options.rounds + 1) for kind, count in reducer.counters.totals().items()}
        result = {
            "layout": plan.reason,
            "mb": options.mb,
            "rounds": options.rounds,
            "median_s": medians,
            "ratio": medians["hierarchical"] / medians["flat"],
            "stages": stages,
        }
        print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
