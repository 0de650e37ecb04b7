"""Bucket sizes of DDP from the times at which gradients become ready, and the time of all-reduces of two sizes.

Buckets are reduced one after another, each as soon as it is complete: bucket k ends at max(end of k - 1, last gradient ready)
+ latency + bytes / rate. The plan is the partition whose last bucket ends first; an exact dynamic programme, since a later
bucket never ends earlier if the one before ends later.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

_SMALL_BYTES, _LARGE_BYTES = 1 << 16, 1 << 26
_REPEATS = 5


@dataclass(frozen=True)
class Link:
    """An all-reduce of n bytes takes `latency_s` + n * `per_byte_s`."""

    latency_s: float
    per_byte_s: float

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes * self.per_byte_s


@dataclass(frozen=True)
class BucketPlan:
    """The sizes of buckets in the order of the backward pass, and when the last one ends, from the start of the passes."""

    sizes_bytes: tuple[int, ...]
    ends_s: float

    @property
    def sizes_mb(self) -> list[float]:
        """The sizes as `bucket_cap_mb_list`, whose buckets end with the parameter that reaches the size."""
        return [size / 2**20 for size in self.sizes_bytes]


def plan_buckets(ready_s: Sequence[float], sizes_bytes: Sequence[int], link: Link) -> BucketPlan:
    """Return the fastest buckets for gradients of these sizes, in the order in which they become ready."""
    count = len(sizes_bytes)
    up_to = [0]
    for size in sizes_bytes:
        up_to.append(up_to[-1] + size)
    ends, begins = [0.0], [0]  # of the last bucket, if it ends with each gradient; where it begins
    for after in range(1, count + 1):
        found = [
            (max(ends[start], ready_s[after - 1]) + link.seconds(up_to[after] - up_to[start]), start)
            for start in range(after)
        ]
        end, start = min(found)
        ends.append(end)
        begins.append(start)
    cuts = [count]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    cuts.reverse()
    sizes = tuple(up_to[end] - up_to[start] for start, end in pairwise(cuts))
    return BucketPlan(sizes, ends[-1])


def measure_link(group: dist.ProcessGroup, size_bytes: int, device: torch.device) -> Link:
    """Fit a link to all-reduces of 64 KiB and of `size_bytes`, at most 64 MiB, fp32. Collective; the same on all ranks."""
    size_bytes, seconds = min(size_bytes, _LARGE_BYTES), []
    for size in (_SMALL_BYTES, size_bytes):
        values, found = torch.zeros(max(1, size // 4), device=device), []
        for _ in range(_REPEATS):
            begun = _now(device)
            dist.all_reduce(values, group=group)
            found.append(_now(device) - begun)
        seconds.append(statistics.median(found))
    small_s, large_s = _largest(seconds, group, device)
    if size_bytes <= 2 * _SMALL_BYTES:
        return Link(small_s, 0.0)
    per_byte_s = max(0.0, large_s - small_s) / (size_bytes - _SMALL_BYTES)
    return Link(max(0.0, small_s - _SMALL_BYTES * per_byte_s), per_byte_s)


def measure_readiness(
    model: nn.Module, group: dist.ProcessGroup, run: Callable[[], None]
) -> tuple[list[float], list[int]]:
    """Return when each gradient is ready after the start of `run`, and its bytes, in this order. Collective.

    The order is that of the group's first rank, and the times those of its slowest rank.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    marks: dict[int, float | torch.cuda.Event] = {}
    device = trained[0].device

    def note(number: int) -> Callable[[Tensor], None]:
        return lambda _: marks.__setitem__(number, _mark(device))

    hooks = [one.register_post_accumulate_grad_hook(note(number)) for number, one in enumerate(trained)]
    begun = _mark(device)
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    _now(device)
    own = [_between(begun, marks.get(number, begun)) for number in range(len(trained))]
    ready_s = _largest(own, group, device)
    order = torch.tensor(sorted(range(len(trained)), key=own.__getitem__), device=device)
    dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
    numbers = order.tolist()
    sizes = [trained[number].nbytes for number in numbers]
    latest, ordered = 0.0, []
    for number in numbers:  # a bucket waits for all gradients before it
        latest = max(latest, ready_s[number])
        ordered.append(latest)
    return ordered, sizes


def _mark(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(begun.elapsed_time(ended)) / 1000
    assert isinstance(begun, float) and isinstance(ended, float), "marks are of one device"
    return ended - begun


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _largest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [float(one) for one in found.tolist()]
