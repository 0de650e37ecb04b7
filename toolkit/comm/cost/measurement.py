"""Measure links between ranks, and whole algorithms at small sizes.

Links: messages between one pair of ranks, and between all ranks at once. In the second case, each rank sends to the
rank with the same index on the next node, or to the next rank of its own node, so that the times include the effects of
shared links and processors.

Algorithms: the model covers neither the waiting time for a processor nor the cost of a call. Each algorithm therefore
runs at a few small sizes. The error of the prediction there corrects other predictions, with decreasing weight up to
the size at which bandwidth dominates. All times are those of the slowest rank.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

import torch
import torch.distributed as dist

from toolkit.comm.cost.model import LINKS, Line, Links, fit
from toolkit.comm.peers import Message, Peers
from toolkit.comm.reductions import fold

LINK_SIZES_BYTES = tuple(4**power * 1024 for power in range(1, 7))  # 4 KiB to 4 MiB per rank
BUDGET_S = 5.0  # seconds for each tier of links
_MOST_IN_A_ROW = 16  # as many as an algorithm has rounds, because ranks that wait for each other synchronize
_LEAST_IN_A_ROW = 4
_IN_A_ROW_BYTES = 1024 * 1024  # target size of a sequence of exchanges
_MOST_REPEATS = 7
_LEAST_REPEATS = 3
_FOLD_BYTES = 4 * 1024 * 1024
SIZES_BYTES = tuple(kib * 1024 for kib in (2, 16, 64, 256, 512))  # sizes at which algorithms are measured
_TRUSTED_BYTES = 2 * 1024 * 1024  # from this size on, the model is not corrected
_LEAST_TRIES = 2
_HOPELESS = 4.0  # an algorithm that takes this many times as long as the fastest is not measured further

AllReduce = Callable[[torch.Tensor, str], object]


@dataclass(frozen=True)
class _Pattern:
    """The peers to which this rank sends and from which it receives.

    `of_node` is the number of messages over the link of the busiest node, or inside that node.
    """

    to: tuple[int, ...]
    from_: tuple[int, ...]
    of_node: int


def measure_links(peers: Peers, budget_s: float = BUDGET_S) -> Links:
    """Measure the links between peers with known nodes, and return a model of them. Collective.

    Args:
        budget_s: seconds for each tier, the network and the node; large sizes that do not fit are omitted.
    """
    assert peers.nodes, "the nodes must be known"
    node_number, node = next((number, node) for number, node in enumerate(peers.nodes) if peers.place in node)
    inside = node.index(peers.place)
    lines: dict[str, Line] = {}
    if len(peers.nodes) > 1:
        everyone, pair = _across(peers, node_number, inside)
        lines["network"] = _line(peers, everyone, budget_s * 0.35)
        lines["network_spread"] = _line(peers, _spread(peers, node), budget_s * 0.2)
        lines["network_alone"] = _line(peers, pair, budget_s * 0.15)
    if shared := [members for members in peers.nodes if len(members) > 1]:
        right, left = node[(inside + 1) % len(node)], node[inside - 1]
        has_neighbours = len(node) > 1
        most = max(map(len, peers.nodes))
        everyone = _Pattern((right,) if has_neighbours else (), (left,) if has_neighbours else (), most)
        lines["node"] = _line(peers, everyone, budget_s * 0.45)
        lines["node_alone"] = _line(peers, _alone(peers, shared[0][:2]), budget_s * 0.25)
    # No schedule uses a tier that this layout does not have.
    no_time = fit({1: [1e-9], 2: [2e-9]})
    fold_s_per_byte = _fold_seconds(peers) / _FOLD_BYTES
    return Links(**{name: lines.get(name, no_time) for name in LINKS}, fold_s_per_byte=fold_s_per_byte)


def _across(peers: Peers, node_number: int, inside: int) -> tuple[_Pattern, _Pattern]:
    """Return the patterns for (all ranks to the next node, one pair of ranks on two nodes)."""
    count = len(peers.nodes)
    following, before = peers.nodes[(node_number + 1) % count], peers.nodes[(node_number - 1) % count]
    pairs = zip(peers.nodes, (*peers.nodes[1:], peers.nodes[0]), strict=True)
    most = max(min(len(one), len(other)) for one, other in pairs)
    everyone = _Pattern(following[inside : inside + 1], before[inside : inside + 1], most)
    return everyone, _alone(peers, (peers.nodes[0][0], peers.nodes[1][0]))


def _spread(peers: Peers, node: tuple[int, ...]) -> _Pattern:
    """Return the pattern from all ranks to all ranks of other nodes, in which many connections share a link."""
    others = tuple(place for place in range(peers.size) if place not in node)
    return _Pattern(others, others, max(len(one) * (peers.size - len(one)) for one in peers.nodes))


def _alone(peers: Peers, pair: tuple[int, ...]) -> _Pattern:
    """Return the pattern between two ranks, in which both directions of a link are busy, as in a ring."""
    if peers.place not in pair:
        return _Pattern((), (), 1)
    other = pair[1 - pair.index(peers.place)]
    return _Pattern((other,), (other,), 1)


def _line(peers: Peers, pattern: _Pattern, budget_s: float) -> Line:
    """Return the time of a pattern as a function of size, measured at as many sizes as fit in the budget."""
    samples: dict[int, list[float]] = {}
    start = time.monotonic()
    for number, size in enumerate(LINK_SIZES_BYTES, 1):
        outgoing = torch.zeros(size, dtype=torch.uint8)
        sends: list[Message] = [(outgoing, place) for place in pattern.to]
        receives: list[Message] = [(torch.empty_like(outgoing), place) for place in pattern.from_]
        in_a_row = max(_LEAST_IN_A_ROW, min(_MOST_IN_A_ROW, _IN_A_ROW_BYTES // size))
        times: list[float] = []
        for _ in range(_MOST_REPEATS):
            times.append(_exchange_s(peers, sends, receives, in_a_row))
            spent = _largest(peers, time.monotonic() - start)
            # On a busy machine, small messages are slow, too, and must not use up the budget of large ones.
            share_s = budget_s * number / len(LINK_SIZES_BYTES)
            if len(times) >= _LEAST_REPEATS and spent + times[-1] * in_a_row > share_s:
                break
        samples[size * pattern.of_node] = times
        next_s = 4 * min(times) * _LEAST_IN_A_ROW * _LEAST_REPEATS
        if len(samples) > 1 and spent + next_s > budget_s:
            break
    return fit(samples)


def _exchange_s(peers: Peers, sends: Sequence[Message], receives: Sequence[Message], in_a_row: int) -> float:
    """Return the seconds of one exchange in a sequence.

    Another exchange precedes the sequence, because an idle link may carry the first bytes faster than later ones.
    """
    dist.barrier(group=peers.group)
    peers.exchange(sends, receives)
    start = time.perf_counter()
    for _ in range(in_a_row):
        peers.exchange(sends, receives)
    return _largest(peers, time.perf_counter() - start) / in_a_row


def _fold_seconds(peers: Peers) -> float:
    """Return the seconds of a local sum while all ranks compute one, because they share processors and memory."""
    data, other = torch.zeros(_FOLD_BYTES // 4), torch.ones(_FOLD_BYTES // 4)
    return min(_slowest_s(peers, partial(fold, data, other, "sum")) for _ in range(_MOST_REPEATS))


@dataclass(frozen=True)
class Correction:
    """The ratios of measured to predicted seconds of one algorithm, at ascending sizes."""

    sizes: tuple[int, ...]
    ratios: tuple[float, ...]

    def ratio(self, size_bytes: float) -> float:
        """Return the factor for a prediction at this size, interpolated on a logarithmic scale."""
        sizes, logs = (*self.sizes, _TRUSTED_BYTES), [*map(math.log, self.ratios), 0.0]
        at = bisect_right(sizes, size_bytes)
        if at in (0, len(sizes)):
            return math.exp(logs[0] if at == 0 else 0.0)
        low, high = sizes[at - 1], sizes[at]
        share = math.log(size_bytes / low) / math.log(high / low)
        return math.exp(logs[at - 1] * (1 - share) + logs[at] * share)


def correct(tried: Mapping[str, Mapping[int, float]], predict: Callable[[str, int], float]) -> dict[str, Correction]:
    """Return the correction of each algorithm, from its measured and predicted seconds."""
    return {
        name: Correction(tuple(taken), tuple(seconds / predict(name, size) for size, seconds in taken.items()))
        for name, taken in tried.items()
    }


def try_all(
    peers: Peers, algorithms: Sequence[str], all_reduce: AllReduce, budget_s: float
) -> dict[str, dict[int, float]]:
    """Return the median seconds of each algorithm at each small size; the algorithms alternate. Collective."""
    medians: dict[str, dict[int, float]] = {name: {} for name in algorithms}
    start = time.monotonic()
    for number, size in enumerate(SIZES_BYTES, 1):
        data = torch.zeros(size // 4)
        taken: dict[str, list[float]] = {name: [] for name in algorithms}
        for repeat in range(1, _MOST_REPEATS + 1):
            for name in algorithms:
                if repeat > 1 and taken[name][0] > _HOPELESS * min(first for first, *_ in taken.values()):
                    continue  # it is too slow to be chosen
                if number == repeat == 1:  # the first call opens connections
                    all_reduce(data, name)
                taken[name].append(_slowest_s(peers, partial(all_reduce, data, name)))
            spent = _largest(peers, time.monotonic() - start)
            if spent > budget_s or (repeat >= _LEAST_TRIES and spent > budget_s * number / len(SIZES_BYTES)):
                break
        for name in algorithms:
            medians[name][size] = median_low(taken[name])  # a mean of two values would include the delay of one
    return medians


def _slowest_s(peers: Peers, work: Callable[[], object]) -> float:
    dist.barrier(group=peers.group)
    start = time.perf_counter()
    work()
    return _largest(peers, time.perf_counter() - start)


def _largest(peers: Peers, value: float) -> float:
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=peers.group)
    return float(largest)
