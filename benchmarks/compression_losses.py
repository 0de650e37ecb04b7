"""The loss of a small GPT after some steps with each algorithm of `[gradient_compression]`, relative to dense gradients.

    python benchmarks/compression_losses.py [--ranks 4] [--steps 300] [--seeds 3] [--optimizers adamw sgd]

Real gloo ranks on this machine, one thread each; all algorithms have their default keys, those with error feedback also
without it. Bytes of Python's standard library, cosine rate, gradients clipped after the exchange. Prints the mean over
the seeds of the validation loss, its range, and the gap to dense.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.peers import Peers
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable
from toolkit.jobs import train_lm
from toolkit.train.data.text import Windows, read_bytes, standard_library_sources

MODEL = train_lm.Arguments(layers=2, width=64, heads=4, context=64, dropout=0.0)
SAMPLES = 4  # per rank and step
RATES = {"adamw": 3e-3, "sgd": 0.2}


def cases() -> Iterator[tuple[str, GradientCompressionTable | None]]:
    yield "none", None
    for name, facts in ALGORITHMS.items():
        if name == "auto":
            yield "auto (aggressive)", GradientCompressionTable(algorithm=name, policy="aggressive", min_elements=1024)
            continue
        yield name, GradientCompressionTable(algorithm=name, min_elements=1024)
        if facts.feedback:
            yield (
                f"{name}, no feedback",
                GradientCompressionTable(algorithm=name, min_elements=1024, error_feedback="off"),
            )


def train(
    data: Windows, peers: Peers, settings: GradientCompressionTable | None, optimizer: str, seed: int, steps: int
) -> float:
    torch.manual_seed(seed)
    model = train_lm.GPT(MODEL)
    for name, parameter in model.named_parameters():
        train_lm.initialise(name, parameter.data)
    named = dict(model.named_parameters())
    compression = GradientCompression(settings, named, seed) if settings is not None else None
    if compression is not None:
        compression.kept.peers = peers
    if optimizer == "adamw":
        update: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[optimizer])
    else:
        update = torch.optim.SGD(model.parameters(), lr=RATES[optimizer], momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(update, steps)
    drawn = torch.Generator().manual_seed(1000 * seed + peers.place)
    for _ in range(steps):
        inputs, targets = take(data, drawn, SAMPLES)
        update.zero_grad()
        train_lm.loss_of(model(inputs), targets).backward()
        gradients = [one.grad for one in named.values() if one.grad is not None]
        if compression is None:
            flat = torch.cat([one.flatten() for one in gradients]).div_(peers.size)
            dist.all_reduce(flat)
            for one, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                one.copy_(mean.view(one.shape))
        else:
            compression.reduce(list(named), gradients, peers)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        schedule.step()
    inputs, targets = take(data, torch.Generator().manual_seed(5), 64)
    with torch.no_grad():
        return float(train_lm.loss_of(model(inputs), targets))


def take(data: Windows, drawn: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return data.finished(data.take(torch.randint(data.count, (count,), generator=drawn).numpy()))


def run(rank: int, ranks: int, folder: Path, steps: int, seeds: int, optimizers: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    peers = Peers(dist.group.WORLD, tuple(range(ranks)), rank)
    data = Windows(read_bytes(standard_library_sources(), max_bytes=1_000_000), MODEL.context)
    for optimizer in optimizers:
        dense = 0.0
        for name, settings in cases():
            losses = [train(data, peers, settings, optimizer, seed, steps) for seed in range(seeds)]
            mean = statistics.mean(losses)
            dense = mean if settings is None else dense
            if rank == 0:
                spread = f"{min(losses):.3f} to {max(losses):.3f}"
                print(f"{optimizer:<6} {name:<24} {mean:.3f} ({spread}), {mean - dense:+.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    given = parser.parse_args()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (given.ranks, Path(folder), given.steps, given.seeds, given.optimizers), given.ranks)


if __name__ == "__main__":
    main()
