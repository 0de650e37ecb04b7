"""How long calls take on one rank, by a monotonic clock; on a GPU by events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch


def time_calls(call: Callable[[int], object], iterations: int, device: str) -> tuple[float, float]:
    """(mean, median) seconds of so many calls, one after the other. On a GPU its stream is waited for in the end.

    The mean is that of the whole stretch, as in nccl-tests; so it has the time between the calls, too.
    """
    moments = _gpu_moments if device.startswith("cuda") else _cpu_moments
    stretches = moments(call, iterations)
    return sum(stretches) / iterations, median(stretches)


def _cpu_moments(call: Callable[[int], object], iterations: int) -> list[float]:
    moments = [time.perf_counter()]
    for turn in range(iterations):
        call(turn)
        moments.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(moments)]


def _gpu_moments(call: Callable[[int], object], iterations: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for turn in range(iterations):
        call(turn)
        events[turn + 1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
