"""The loss of train_lm after a fixed number of steps, and the bytes that a rank sends per step, with fewer exchanges.

    python benchmarks/local_sgd.py [--ranks 2] [--steps 400]

Every rank is a process of this machine with one thread. Prints the validation loss of the shipped model, made smaller, after
the last step, and the mean of the bytes that a rank sends per step, with the exchange of the last save. Bytes follow from the
collectives (`toolkit/comm/sent_bytes.py`), so that the load of the machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from toolkit.comm.sent_bytes import SentBytes
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.jobs import train_lm
from toolkit.metrics.validation import read_validations
from toolkit.world.facts import World

EVERY_50 = {"local_sgd.algorithm": "diloco", "local_sgd.every": 50}
FRAGMENTS = {"local_sgd.fragments": 5}
INT8 = {"gradient_compression.algorithm": "int8"}
GENTLE = {"local_sgd.outer_momentum": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "average, every 10": {"local_sgd.algorithm": "average"},
    "diloco, every 10": {"local_sgd.algorithm": "diloco"},
    "diloco, every 50": EVERY_50,
    "diloco, every 50, int8": EVERY_50 | INT8,
    "diloco, every 50, 5 fragments": EVERY_50 | FRAGMENTS,
    "diloco, every 50, outer_momentum 0.5": EVERY_50 | GENTLE,
    "diloco, every 50, 5 fragments, outer_momentum 0.5": EVERY_50 | FRAGMENTS | GENTLE,
}
MODEL = {"layers": 2, "width": 64, "heads": 4, "context": 64, "max_bytes": 1_000_000, "held_out": 0.02, "dropout": 0.0}


def job_of(case: dict[str, Any], ranks: int, steps: int) -> ResolvedJob:
    train = {"steps": steps, "batch": 16, "lr": 3e-3, "warmup_steps": 20, "validate_every": steps}
    tables = {"train": train, "args": MODEL, "checkpoint": {"every_steps": 0}, "job": {"ranks_per_node": ranks}}
    values = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()} | case
    settings = [f"{key}={value}" for key, value in values.items()]
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, settings=settings)


def train(rank: int, ranks: int, folder: Path, config: ResolvedJob) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    world = World(
        rank=rank, local_rank=rank, size=ranks, local_size=ranks, node=0, nodes=1, host="localhost", device="cpu",
        launcher="local", discovered_by="benchmark", attempt=0, run_dir=folder,
    )  # fmt: skip
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    with SentBytes() as sent:
        train_lm.main(world, config)
    if rank == 0:
        (folder / "sent.json").write_text(json.dumps(sent.total))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            mp.spawn(train, (given.ranks, folder, job_of(case, given.ranks, given.steps)), given.ranks)
            (validation,) = read_validations(folder / "metrics" / "validation.jsonl")
            sent = json.loads((folder / "sent.json").read_text()) / given.steps
            print(f"{name:<50} loss {validation.means['loss']:.3f}, {sent / 1e3:8.1f} kB per step", flush=True)


if __name__ == "__main__":
    main()
