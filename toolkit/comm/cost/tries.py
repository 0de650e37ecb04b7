"""What the model cannot know of small messages: how long ranks wait for a processor, and what a call itself costs.

So each algorithm is tried as a whole at a few small sizes. How far the model was off there goes into its predictions, less
and less towards the size from which bytes are what counts.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

import torch
import torch.distributed as dist

from toolkit.comm.peers import Peers

SIZES_BYTES = tuple(kib * 1024 for kib in (2, 16, 64, 256, 512))
_TRUSTED_BYTES = 2 * 1024 * 1024  # from here on the model is not corrected
_MOST_REPEATS = 7
_LEAST_REPEATS = 2
_HOPELESS = 4.0  # times as slow as the fastest

AllReduce = Callable[[torch.Tensor, str], object]


@dataclass(frozen=True)
class Correction:
    """Measured seconds / predicted ones of one algorithm, at ascending sizes."""

    sizes: tuple[int, ...]
    ratios: tuple[float, ...]

    def ratio(self, size_bytes: float) -> float:
        """By what a prediction for this size is to be multiplied: straight between sizes on a logarithmic scale."""
        sizes, logs = (*self.sizes, _TRUSTED_BYTES), [*map(math.log, self.ratios), 0.0]
        at = bisect_right(sizes, size_bytes)
        if at in (0, len(sizes)):
            return math.exp(logs[0] if at == 0 else 0.0)
        low, high = sizes[at - 1], sizes[at]
        share = math.log(size_bytes / low) / math.log(high / low)
        return math.exp(logs[at - 1] * (1 - share) + logs[at] * share)


def correct(tried: Mapping[str, Mapping[int, float]], predict: Callable[[str, int], float]) -> dict[str, Correction]:
    """The correction of each algorithm, from the seconds that it took and those that were predicted."""
    return {
        name: Correction(tuple(taken), tuple(seconds / predict(name, size) for size, seconds in taken.items()))
        for name, taken in tried.items()
    }


def try_all(
    peers: Peers, algorithms: Sequence[str], all_reduce: AllReduce, budget_s: float
) -> dict[str, dict[int, float]]:
    """Seconds of each algorithm at each small size, on the slowest rank: the median of some tries by turns. Collective."""
    found: dict[str, dict[int, float]] = {name: {} for name in algorithms}
    began = time.monotonic()
    for number, size in enumerate(SIZES_BYTES, 1):
        data = torch.zeros(size // 4)
        taken: dict[str, list[float]] = {name: [] for name in algorithms}
        for repeat in range(1, _MOST_REPEATS + 1):
            for name in algorithms:
                if repeat > 1 and taken[name][0] > _HOPELESS * min(first for first, *_ in taken.values()):
                    continue  # it will not be chosen, however well its time is known
                if number == repeat == 1:  # which opens connections
                    all_reduce(data, name)
                taken[name].append(_slowest_s(peers, partial(all_reduce, data, name)))
            spent = _largest(peers, time.monotonic() - began)
            if spent > budget_s or (repeat >= _LEAST_REPEATS and spent > budget_s * number / len(SIZES_BYTES)):
                break
        for name in algorithms:
            found[name][size] = median_low(taken[name])  # of few, the mean of two would keep what delayed one of them
    return found


def _slowest_s(peers: Peers, work: Callable[[], object]) -> float:
    dist.barrier(group=peers.group)
    start = time.perf_counter()
    work()
    return _largest(peers, time.perf_counter() - start)


def _largest(peers: Peers, value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peers.group)
    return float(found)
