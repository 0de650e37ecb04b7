"""Attention over ranks that share long sequences, beside one process: time, error, and memory of a training step.

    python benchmarks/long_context.py [--rounds 5]

Every rank is a process of this machine with one thread, so 2 ranks need 2 idle cores. Prints for each length the
fastest and the median time of attention, forward and backward, the ratio of the fastest to that of one process, and the
largest relative error of outputs and gradients. Then the growth of a rank's peak memory (VmHWM) in a step of the model
of train_lm with 8,192 tokens, of which one rank of 4 has a quarter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.train_lm import GPT, Arguments, loss_of
from toolkit.parallel.context.attention import Attention, split_context
from toolkit.parallel.context.order import own_tokens

LENGTHS = (512, 4096, 16384, 32768)
HEADS, WIDTH = 4, 32
TOKENS = 8192  # of the step whose memory is measured


def own(tensor: Tensor) -> Tensor:
    return own_tokens(tensor.transpose(1, 2), dist.get_rank(), dist.get_world_size()).transpose(1, 2).contiguous()


def timed(method: str, given: list[Tensor], gradient: Tensor) -> tuple[float, list[Tensor]]:
    """Seconds of attention forward and backward; "alone" computes whole sequences. Returns outputs and gradients, too."""
    attention = Attention()
    if method != "alone":
        assert dist.group.WORLD is not None
        split_context(attention, dist.group.WORLD, method)
    leaves = [one.detach().clone().requires_grad_() for one in given]
    begin = time.perf_counter()
    mixed = attention(*leaves)
    mixed.backward(gradient)
    return time.perf_counter() - begin, [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(rank: int, ranks: int, rounds: int, folder: str) -> None:
    begin(rank, ranks, folder)
    for tokens in LENGTHS:
        torch.manual_seed(0)
        *given, gradient = (torch.randn(1, HEADS, tokens, WIDTH) for _ in range(4))
        seconds: dict[str, list[float]] = {"alone": [], "ring": [], "heads": []}
        errors: dict[str, float] = {}
        right: list[Tensor] = []
        for number in range(-1, rounds):  # the first round warms up
            for method, times in seconds.items():
                dist.barrier()
                if method == "alone":
                    taken, found = timed(method, given, gradient) if rank == 0 or number < 0 else (0.0, right)
                    right = found
                else:
                    taken, found = timed(method, [own(one) for one in given], own(gradient))
                    errors[method] = max(apart(one, own(whole)) for one, whole in zip(found, right, strict=True))
                slowest = torch.tensor(taken)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if number >= 0:
                    times.append(float(slowest))
        if rank == 0:
            for method, times in seconds.items():
                ratio = f"{min(seconds['alone']) / min(times):.2f}x, error {errors.get(method, 0.0):.1e}"
                print(
                    f"{ranks} ranks, {tokens:6} tokens, {method:5}: {min(times):.3f} / {statistics.median(times):.3f} s, {ratio}",
                    flush=True,
                )
    dist.destroy_process_group()


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def peak(rank: int, ranks: int, folder: str) -> None:
    """Print the growth of rank 0's peak memory in a step."""
    begin(rank, ranks, folder)
    model = GPT(Arguments(layers=4, width=128, heads=4, context=TOKENS, dropout=0.0))
    if ranks > 1:
        assert dist.group.WORLD is not None
        split_context(model, dist.group.WORLD, "ring")
    text = torch.randint(256, (1, TOKENS + 1))
    inputs, targets = (own_tokens(one, rank, ranks) for one in (text[:, :-1], text[:, 1:]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = memory_kib("VmRSS")
    loss_of(model(inputs), targets).backward()
    if rank == 0:
        print(f"cp {ranks}, {TOKENS} tokens: the step adds {(memory_kib('VmHWM') - before) / 1024:.0f} MiB", flush=True)
    dist.destroy_process_group()


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def begin(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    print(f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (2, rounds, folder), 2)
    for ranks in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(peak, (ranks, folder), ranks)


if __name__ == "__main__":
    main()
