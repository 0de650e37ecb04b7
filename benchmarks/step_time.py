"""Measure the seconds per step of toolkit's training loop, against a plain DDP loop written by hand.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py [--pairs 200] [--ranks 2] [--width 128]

Both train the model of `jobs/train_lm.py` at its default sizes in the same process group. Their steps alternate, so
that noise affects both. The plain loop does not reduce its loss over ranks, write metrics or check for stop requests;
toolkit's loop does. Neither saves checkpoints. The time of a step is that of the slowest rank. Prints one JSON object;
`median_ratio` is the median of ours / plain over the pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from toolkit.config.request import resolve_job
from toolkit.jobs import train_lm
from toolkit.metrics.training import TrainLog
from toolkit.rundir.layout import RunDirectory, create_run
from toolkit.train.data.text import Windows, read_bytes, standard_library_sources
from toolkit.train.loop import training_steps
from toolkit.train.optim.precision import use_deterministic_kernels
from toolkit.train.trainer import Task, Trainer
from toolkit.world.facts import World
from toolkit.world.stop import StopWatch

JOB = Path(train_lm.__file__).with_name("train_lm.toml")
TARGET = 1.03
WARM_UP = 3  # pairs that are not counted: DDP builds its buckets, and allocators grow


def plain_steps(args: train_lm.Arguments, train: SimpleNamespace, text: bytes) -> Iterator[float]:
    """A training loop that a user would write with torch only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    base = train_lm.GPT(args)
    model = DistributedDataParallel(base)
    matrices = [p for p in base.parameters() if p.dim() >= 2]
    vectors = [p for p in base.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    chooser = torch.Generator().manual_seed(rank)
    micro_steps = train.batch // ranks // train.micro_batch
    for step in range(sys.maxsize):
        warm = min(1.0, (step + 1) / train.warmup_steps)
        rate = train.lr * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / train.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum = 0.0
        for number in range(micro_steps):
            starts = torch.randint(len(data) - args.context - 1, (train.micro_batch, 1), generator=chooser)
            rows = data[starts + torch.arange(args.context + 1)].long()
            with nullcontext() if number == micro_steps - 1 else model.no_sync():
                logits = model(rows[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / micro_steps
                loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss_sum


def our_steps(args: train_lm.Arguments, train: SimpleNamespace, text: bytes, run: RunDirectory) -> Iterator[float]:
    """The loop of `jobs/train_lm.py` in a real run directory, with heartbeat, control files and metrics."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    watch = StopWatch(run=run, attempt=run.attempt(0))
    world = World(rank, rank, ranks, ranks, 0, 1, "", "cpu", "local", "benchmark", run_dir=run.path, stop_watch=watch)
    config = resolve_job(JOB, site=None, environ={}, flags={})
    windows = Windows(text, args.context)
    task = Task(lambda: train_lm.GPT(args), train_lm.initialise, train_lm.OUTLINE, train_lm.loss_of, windows)
    trainer = Trainer(world, config, task)
    log = TrainLog(run.metrics / "train.jsonl") if rank == 0 else None
    train.steps = sys.maxsize
    steps = training_steps(world, train, trainer.state, trainer.step, trainer.loader.take_samples, None)
    for record in steps:
        if log:
            log.write(record)
        yield record.loss


def seconds_of(take_step: Callable[[], object]) -> float:
    dist.barrier()
    started = time.monotonic()
    take_step()
    return time.monotonic() - started


def measure(rank: int, folder: Path, run: RunDirectory, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    job = tomllib.loads(JOB.read_text())
    args = train_lm.Arguments(**job["args"] | {"width": options.width})
    train = SimpleNamespace(
        **{"weight_decay": 0.1, "clip_norm": 1.0, "log_every": 1, "profile_steps": 0, "profile_from": 1} | job["train"]
    )
    text = read_bytes(standard_library_sources(), max_bytes=args.max_bytes)
    plain, ours = plain_steps(args, SimpleNamespace(**vars(train)), text), our_steps(args, train, text, run)

    def our_step() -> None:
        use_deterministic_kernels()  # only toolkit's loop uses deterministic kernels
        next(ours)
        torch.use_deterministic_algorithms(False)

    pairs = torch.empty(options.pairs + WARM_UP, 2, dtype=torch.float64)
    for number in range(len(pairs)):
        turns = [(0, our_step), (1, lambda: next(plain))]
        for column, take_step in turns if number % 2 else reversed(turns):
            pairs[number, column] = seconds_of(take_step)
    dist.all_reduce(pairs, op=dist.ReduceOp.MAX)
    if rank == 0:
        report(pairs[WARM_UP:].tolist(), options)
    dist.barrier()
    dist.destroy_process_group()


def report(pairs: list[list[float]], options: argparse.Namespace) -> None:
    ratios = sorted(ours / plain for ours, plain in pairs)
    # Confidence interval of the median by order statistics: Conover, Practical Nonparametric Statistics, section 3.2.
    reach = 0.98 * math.sqrt(len(ratios))
    low, high = int(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
    result = {
        "pairs": len(pairs),
        "ranks": options.ranks,
        "width": options.width,
        "median_ratio": round(statistics.median(ratios), 4),
        "median_ratio_95_percent": [round(ratios[low], 4), round(ratios[min(high, len(ratios) - 1)], 4)],
        "median_ours_s": round(statistics.median(ours for ours, _ in pairs), 5),
        "median_plain_s": round(statistics.median(plain for _, plain in pairs), 5),
        "target": TARGET,
        "met": statistics.median(ratios) <= TARGET,
    }
    print(json.dumps(result, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="number of pairs, at least 20")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = create_run(folder, "step_time")
        run.attempt(0).path.mkdir()
        torch.multiprocessing.spawn(measure, (folder, run, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
