"""Measure what the waits that toolkit measures cost a script of two DDP ranks whose steps take about 5 ms.

    OMP_NUM_THREADS=1 python benchmarks/script_waits_cost.py [--rounds 7] [--steps 1000]

The cost is the processor time of `toolkit.step`, plus what a measured step takes longer than the others of the same round, by
their medians. Processor time of the training thread counts, because other work on the machine lengthens elapsed time.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from recorder_cost import enter_run
from torch.nn.parallel import DistributedDataParallel

import toolkit
from toolkit.metrics.ring import rings_of
from toolkit.world.record import recorder_of_rank
from toolkit.world.script_waits import ScriptWaits


def ddp_step() -> Callable[[], None]:
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 256)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_main(rank: int, folder: str, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    enter_run(Path(folder))
    os.environ["TOOLKIT_RANK"] = str(rank + 1)  # rank 0 would also write the heartbeat
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    step, shares = ddp_step(), []
    recorder = recorder_of_rank()
    assert recorder is not None
    waits: ScriptWaits = recorder.end_reported.__self__  # type: ignore[attr-defined]
    for turn in range(rounds + 1):
        taken: dict[bool, list[int]] = {True: [], False: []}  # of steps that are measured, and of others
        calls = 0
        for number in range(turn * steps, (turn + 1) * steps):
            is_measured = waits._sampled is not None and waits._sampled.is_on
            began = time.thread_time_ns()
            step()
            ended = time.thread_time_ns()
            toolkit.step(number)
            calls += time.thread_time_ns() - ended
            taken[is_measured].append(ended - began)
        if turn:
            usual = statistics.median(taken[False])
            extra = max(0.0, statistics.median(taken[True]) - usual) * len(taken[True])
            shares.append((calls + extra) / steps / usual * 100)
            if rank == 0:
                print(
                    f"step {usual / 1e6:.2f} ms; toolkit.step {calls / steps / 1e3:.1f} us; {len(taken[True])} measured steps, each "
                    f"{extra / len(taken[True]) / 1e3:.0f} us longer: {shares[-1]:.2f} % of a step",
                    flush=True,
                )
    dist.barrier()
    if rank == 0:
        print(
            f"share of a step: min {min(shares):.2f} %, median {statistics.median(shares):.2f} %, max {max(shares):.2f} %"
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, at least 5")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        try:
            torch.multiprocessing.spawn(rank_main, (folder, options.rounds, options.steps), nprocs=2)
        finally:
            for path in rings_of(Path(folder).name, 0):
                path.unlink()


if __name__ == "__main__":
    main()
