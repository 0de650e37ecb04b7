"""Exchanges and training steps with compressed gradients over links of several rates, beside dense ones and torch's PowerSGD.

    toolkit devcluster --name links up --nodes 4
    python benchmarks/compressed_links.py links [--rates 50mbit,100mbit,200mbit,1gbit,none] [--steps 30] [--rounds 5]

Four nodes of the dev cluster with one rank each. First the exchange of 16.8 MB alone, in rounds of all algorithms one after
another; then a GPT of 1.6 M parameters with 256 tokens per rank, of which every algorithm trains its own, one step of each
after the other. Prints minimum and median seconds and ratios of medians to dense, the last validation loss, and the time of steps until
the validation loss that dense has after three quarters of the steps. torch's PowerSGD gets one bucket, since it fails with two on gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import toolkit
from toolkit.comm.communicator import Communicator
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.gradient import find_reduction
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.jobs import train_lm
from toolkit.topology.facts import Topology
from toolkit.train.data.text import Windows, read_bytes, standard_library_sources
from toolkit.world.facts import World

ALGORITHMS = ("none", "bf16", "int8", "int4", "powersgd")
TORCH_POWERSGD = "torch powersgd"
SHAPES = [(1024, 1024)] * 4
MODEL = train_lm.Arguments(layers=8, width=128, heads=4, context=128, dropout=0.0)
SAMPLES, EVALUATED_EVERY = 2, 5  # per rank and step; steps

JOB = """[job]
entry = "{script}:measure"
[args]
steps = {steps}
rounds = {rounds}
"""


def measure(world: World, config: Any) -> dict[str, Any]:
    """Run on each rank; rank 0 returns the seconds and losses."""
    torch.set_num_threads(1)
    exchanged = time_exchanges(world, config.args["rounds"])
    return {"load": os.getloadavg()[0], "exchange": exchanged, "steps": time_steps(world, config.args["steps"])}


def time_exchanges(world: World, rounds: int) -> dict[str, list[float]]:
    communicator, found = Communicator(world), {}
    values = {str(number): torch.randn(shape) for number, shape in enumerate(SHAPES)}
    calls: dict[str, Callable[[], None]] = {}
    for name in ALGORITHMS:
        if name == "none":
            flat = torch.cat([one.flatten() for one in values.values()])
            calls[name] = lambda flat=flat: dist.all_reduce(flat.div_(world.size), group=communicator.peers.group)
            continue
        compression = GradientCompression(GradientCompressionTable(algorithm=name), values)
        calls[name] = lambda one=compression: one.reduce(
            list(values), [value.clone() for value in values.values()], communicator.peers
        )
    for number in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            call()
            dist.barrier()
            if number:  # the first one starts connections
                found.setdefault(name, []).append(time.perf_counter() - begun)
    communicator.close()
    return found


def time_steps(world: World, steps: int) -> dict[str, dict[str, list[float]]]:
    data = Windows(read_bytes(standard_library_sources(), max_bytes=2_000_000), MODEL.context)
    held_out = take(data, torch.Generator().manual_seed(1), 32)
    drawn = torch.Generator().manual_seed(100 + world.rank)
    trained = {name: Trained(world, name) for name in (*ALGORITHMS, TORCH_POWERSGD)}
    for step in range(steps):
        batch = take(data, drawn, SAMPLES)
        for one in trained.values():
            dist.barrier()
            one.step(*batch)
            if (step + 1) % EVALUATED_EVERY == 0:
                one.losses.append(one.evaluate(*held_out))
    return {name: {"seconds": one.seconds, "losses": one.losses} for name, one in trained.items()}


def take(data: Windows, drawn: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return data.finished(data.take(torch.randint(data.count, (count,), generator=drawn).numpy()))


class Trained:
    """One model with its optimizer and its reduction of gradients."""

    def __init__(self, world: World, name: str) -> None:
        torch.manual_seed(0)
        self.model = train_lm.GPT(MODEL)
        for key, parameter in self.model.named_parameters():
            train_lm.initialise(key, parameter.data)
        is_torch = name == TORCH_POWERSGD
        self.parallel = DistributedDataParallel(
            self.model, bucket_cap_mb=1000 if is_torch else 25, gradient_as_bucket_view=True
        )
        if is_torch:
            state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=10)
            self.parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name != "none":
            settings = GradientCompressionTable(algorithm=name, dense_steps=10 if name == "powersgd" else 0)
            compression = GradientCompression(settings, dict(self.model.named_parameters()))
            assert dist.group.WORLD is not None
            found = find_reduction(dist.group.WORLD, world, "auto", Topology((), {}), compression=compression)
            found.register_on(self.parallel)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        train_lm.loss_of(self.parallel(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begun)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(train_lm.loss_of(self.model(inputs), targets))


def report(rate: str, found: dict[str, Any]) -> None:
    print(f"\nlink {rate}, load {found['load']:.1f}", flush=True)
    dense = statistics.median(found["exchange"]["none"])
    for name, seconds in found["exchange"].items():
        middle = statistics.median(seconds)
        print(f"  exchange {name:<16} {min(seconds):7.3f} {middle:7.3f} s  {dense / middle:6.2f}x")
    steps = found["steps"]
    dense = statistics.median(steps["none"]["seconds"][10:])
    losses = steps["none"]["losses"]
    target = min(losses[: max(1, len(losses) * 3 // 4)])
    for name, one in steps.items():
        seconds = one["seconds"][10:]
        middle = statistics.median(seconds)
        reached = next((number for number, loss in enumerate(one["losses"]) if loss <= target), None)
        spent = "never" if reached is None else f"{sum(one['seconds'][: (reached + 1) * EVALUATED_EVERY]):7.1f} s"
        print(
            f"  step     {name:<16} {min(seconds):7.3f} {middle:7.3f} s  {middle / dense:6.2f} of dense, "
            f"last loss {one['losses'][-1]:.4f}, to {target:.3f}: {spent}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--rates", default="50mbit,100mbit,200mbit,1gbit,none")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    job = given.runs / "compressed_links.toml"
    job.write_text(JOB.format(script=Path(__file__).resolve(), steps=given.steps, rounds=given.rounds))
    for rate in given.rates.split(","):
        shape = [Path(sys.executable).with_name("toolkit"), "devcluster", "--name", given.cluster, "shape", "all", rate]
        subprocess.run(shape, check=True, stdout=subprocess.DEVNULL)
        run = toolkit.submit(job, nodes=4, ranks_per_node=1, time="0:40:00", runs=given.runs)
        run.wait()
        report(rate, run.result())


if __name__ == "__main__":
    main()
