"""Compare all-reduce times of the model with measured ones, at sizes that it was not fitted on, and rate its choices.

Run it on two or more nodes with two or more ranks each:

    srun -N4 --ntasks-per-node=2 python benchmarks/collective_model.py [--rounds 5] [--most-mib 16]

Rank 0 prints one JSON object: for each size and algorithm, the predicted seconds and the median seconds of the slowest
rank. `summary` contains the errors |predicted / measured - 1| from 256 KiB on, the number of sizes at which the
algorithm with the least predicted time takes at most 1.1 times the fastest, and its time relative to the backend's
all-reduce.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from toolkit.comm.communicator import Communicator
from toolkit.topology.gather import gather_topology
from toolkit.world.discover import discover
from toolkit.world.rendezvous import start_groups

# Calibration measures none of these sizes, nor a size that adds up to one of them on nodes with two ranks.
SIZES_BYTES = (1_500, 12_000, 96_000, 300_000, 700_000, 1_500_000, 3_000_000, 6_000_000, 11_000_000, 16_000_000)
BARRED_BYTES = 256 * 1024


def slowest(communicator: Communicator, algorithm: str, tensor: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    communicator.all_reduce(tensor, algorithm=algorithm)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(communicator: Communicator, rounds: int, sizes: list[int]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        taken: dict[str, list[float]] = {name: [] for name in communicator.algorithms}
        for number in range(rounds + 1):
            for name in communicator.algorithms:
                seconds = slowest(communicator, name, torch.ones(size // 4))
                if number:  # the first round opens connections, and is not counted
                    taken[name].append(seconds)
        found[size] = {name: statistics.median(values) for name, values in taken.items()}
    return found


def summary(measured: dict[int, dict[str, float]], predicted: dict[int, dict[str, float]]) -> dict[str, Any]:
    errors = sorted(
        abs(predicted[size][name] / seconds - 1)
        for size, of_size in measured.items()
        if size >= BARRED_BYTES
        for name, seconds in of_size.items()
    )
    chosen = {size: min(of_size, key=lambda name: of_size[name]) for size, of_size in predicted.items()}
    lost = {size: measured[size][chosen[size]] / min(measured[size].values()) for size in measured}
    return {
        "errors": len(errors),
        "median_error": round(statistics.median(errors), 3) if errors else None,
        "error_90": round(errors[int(0.9 * (len(errors) - 1))], 3) if errors else None,
        "chosen": chosen,
        "chosen_to_best": {size: round(ratio, 3) for size, ratio in lost.items()},
        "within_10_percent": f"{sum(ratio <= 1.1 for ratio in lost.values())} of {len(lost)}",
        "flat_to_chosen": {size: round(measured[size]["flat"] / measured[size][chosen[size]], 2) for size in measured},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-mib", type=float, default=16.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = discover()
    start_groups(world)
    with Communicator(world, topology=gather_topology(world)) as communicator:
        began = time.perf_counter()
        choice = communicator.choose_by_measurement()
        links = choice.links
        calibration_s = time.perf_counter() - began
        sizes = [size for size in SIZES_BYTES if size <= options.most_mib * 2**20]
        measured = measure(communicator, options.rounds, sizes)
        nodes = communicator.peers.nodes
        names = communicator.algorithms
        predicted = {size: {name: choice.seconds(name, size) for name in names} for size in sizes}
        if world.rank == 0:
            table = {
                size: {name: [round(predicted[size][name], 5), round(measured[size][name], 5)] for name in names}
                for size in sizes
            }
            lines = {
                name: (line.latency_s, line.bytes_per_s)
                for name, line in vars(links).items()
                if name != "fold_s_per_byte"
            }
            result = {
                "nodes": nodes, "calibration_s": round(calibration_s, 2), "latency_s and bytes_per_s": lines,
                "segments": {
                    name: [(one.first_bytes, one.latency_s, one.seconds_per_byte) for one in line.segments]
                    for name, line in vars(links).items() if name != "fold_s_per_byte"
                },
                "tried": choice.tried, "fold_bytes_per_s": 1 / links.fold_s_per_byte, "predicted and measured": table,
                "summary": summary(measured, predicted),
            }  # fmt: skip
            print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
