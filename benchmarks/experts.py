"""Experts in one grouped matrix product, beside a product per expert and one of padded rows; and a layer beside a dense one.

    python benchmarks/experts.py [--rounds 7]

One process with one thread, so it needs an idle core. Prints for each number of experts the fastest and the median time of
the forward and backward passes, and the ratio of the fastest to that of padded products; the rows of the busiest expert are
twice the mean. Then a layer with 8 experts, of which a token uses 2, beside a dense perceptron of the same active width.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from toolkit.parallel.experts.layer import Experts, MoE
from toolkit.parallel.experts.router import Routing

ROWS, WIDTH, HIDDEN = 4096, 512, 1024
Compute = Callable[[Tensor], Tensor]


def looped(experts: Experts, counts: list[int]) -> Compute:
    def compute(rows: Tensor) -> Tensor:
        parts = zip(rows.split(counts), experts.gate, experts.up, experts.down, strict=True)
        return torch.cat([(silu(part @ gate.T) * (part @ up.T)) @ down.T for part, gate, up, down in parts])

    return compute


def padded(experts: Experts, counts: list[int]) -> Compute:
    """Rows of each expert padded to those of the busiest one, in three batched products."""

    def compute(rows: Tensor) -> Tensor:
        blocks = nn.utils.rnn.pad_sequence(rows.split(counts), batch_first=True)
        hidden = silu(blocks @ experts.gate.transpose(1, 2)) * (blocks @ experts.up.transpose(1, 2))
        outputs = hidden @ experts.down.transpose(1, 2)
        return torch.cat([block[:count] for block, count in zip(outputs, counts, strict=True)])

    return compute


def even_padded(experts: Experts, counts: list[int]) -> Compute:
    """The product of a dense layer's speed: rows are as many for each expert, so that nothing is padded."""

    def compute(rows: Tensor) -> Tensor:
        blocks = rows.view(len(counts), -1, rows.shape[1])
        hidden = silu(blocks @ experts.gate.transpose(1, 2)) * (blocks @ experts.up.transpose(1, 2))
        return (hidden @ experts.down.transpose(1, 2)).flatten(0, 1)

    return compute


def seconds_of(compute: Compute, rows: Tensor) -> float:
    given = rows.clone().requires_grad_()
    begin = time.perf_counter()
    compute(given).square().mean().backward()
    return time.perf_counter() - begin


def compare(ways: dict[str, Compute], rows: Tensor, rounds: int, beside: str) -> None:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, compute in ways.items():
            seconds = seconds_of(compute, rows)
            if number:  # the first round warms up
                taken[name].append(1000 * seconds)
    base = min(taken[beside])
    for name, times in taken.items():
        ratio = min(times) / base
        print(f"  {name:<20} {min(times):8.1f} ms, median {statistics.median(times):8.1f} ms, {ratio:.2f} of {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = torch.randn(ROWS, WIDTH)
    for number in (8, 16, 64):
        experts = Experts(number, WIDTH, HIDDEN)
        mean = ROWS // number
        uneven = [2 * mean, 0, *[mean] * (number - 2)]
        for name, counts in (
            ("as many rows for each expert", [mean] * number),
            ("the busiest has twice the mean", uneven),
        ):
            print(f"{number} experts, {name}")
            ways: dict[str, Compute] = {
                "grouped": lambda given, experts=experts, counts=counts: experts(given, torch.tensor(counts)),  # type: ignore[misc]
                "looped": looped(experts, counts),
                "padded": even_padded(experts, counts) if len({*counts}) == 1 else padded(experts, counts),
            }
            compare(ways, rows, rounds, "padded")
    print("a layer with 8 experts, top 2, beside a dense one of the same active width")
    layer, dense = MoE(WIDTH, HIDDEN, Routing(8)), Experts(1, WIDTH, 2 * HIDDEN)
    stream = torch.randn(1, ROWS, WIDTH)
    whole = torch.tensor([ROWS])
    compare({"layer": layer, "dense": lambda given: dense(given.flatten(0, 1), whole)}, stream, rounds, "dense")


if __name__ == "__main__":
    main()
