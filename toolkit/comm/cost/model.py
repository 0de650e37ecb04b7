"""Predict the time of an all-reduce from measured links: latency and bandwidth by size, in a node and between nodes.

A round takes as long as the busiest part of the machine: the link out of a node, the link into it, or its ranks.
Alpha-beta models of this kind: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); for
collectives R. Thakur et al., IJHPCA 19(1), 2005; sharing of a node's link among its ranks as in Gropp, Olson and
Samfass, "Modeling MPI communication performance on SMP nodes", EuroMPI 2016.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from toolkit.comm.algorithms import ALGORITHMS
from toolkit.comm.cost.schedules import RankGroups, Round, Stages


@dataclass(frozen=True)
class Segment:
    """Messages of `first_bytes` or more take `latency_s` plus `seconds_per_byte` for each byte."""

    first_bytes: float
    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Line:
    """The seconds of a message as a function of its bytes: ascending segments, the first of which starts at 0 bytes."""

    segments: tuple[Segment, ...]

    def seconds(self, size_bytes: float) -> float:
        """Return the time of a message; 0 for an empty one."""
        if size_bytes <= 0:
            return 0.0
        at = bisect_right([segment.first_bytes for segment in self.segments], size_bytes) - 1
        return self.segments[at].latency_s + size_bytes * self.segments[at].seconds_per_byte

    @property
    def latency_s(self) -> float:
        """The latency of the smallest messages."""
        return self.segments[0].latency_s

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of the largest messages."""
        return 1 / self.segments[-1].seconds_per_byte


def fit(samples: Mapping[int, list[float]]) -> Line:
    """Return the line through the medians of measured seconds at two or more sizes.

    Noise only adds time, so a median above the median of a larger size is lowered to it.
    """
    sizes = sorted(samples)
    assert len(sizes) >= 2, "a line needs two sizes"
    times = [median(samples[size]) for size in sizes]
    for index in reversed(range(len(times) - 1)):
        times[index] = min(times[index], times[index + 1])
    segments = []
    for (low, low_s), (high, high_s) in pairwise(zip(sizes, times, strict=True)):
        slope = max((high_s - low_s) / (high - low), 1e-15)
        segments.append(Segment(float(low), low_s - slope * low, slope))
    if segments[0].latency_s > 0:
        segments[0] = replace(segments[0], first_bytes=0.0)
    else:  # these sizes give a negative latency, so assume none
        segments.insert(0, Segment(0.0, 0.0, times[0] / sizes[0]))
    # Do not extend the slope of the last segment, because large messages hide the latency of medium sizes.
    segments.append(Segment(float(sizes[-1]), 0.0, times[-1] / sizes[-1]))
    return Line(tuple(segments))


@dataclass(frozen=True)
class Links:
    """Measured seconds as functions of the bytes over the link of a node, or inside a node.

    Attributes:
        network, node: while each rank sends to one other.
        network_spread: while each rank sends to all ranks of other nodes.
        network_alone, node_alone: while one pair communicates.
        fold_s_per_byte: seconds to sum a byte while all ranks compute sums.
    """

    network: Line
    network_spread: Line
    network_alone: Line
    node: Line
    node_alone: Line
    fold_s_per_byte: float


LINKS = ("network", "network_spread", "network_alone", "node", "node_alone")


def predict(algorithm: str, size_bytes: float, nodes: RankGroups, links: Links) -> float:
    """Return the predicted seconds of an all-reduce on these nodes.

    Raises:
        KeyError: the algorithm is unknown.
    """
    return seconds_of(ALGORITHMS[algorithm].schedule(size_bytes, nodes), nodes, links)


def seconds_of(schedule: Stages, nodes: RankGroups, links: Links) -> float:
    """Return the seconds of a pipeline: the first segment passes all stages, the slowest stage limits the others."""
    node_of = {place: number for number, node in enumerate(nodes) for place in node}
    stages = [sum(_round_s(one, node_of, links) for one in stage) for stage in schedule.stages]
    return sum(stages) + (schedule.segments - 1) * max(stages)


def _round_s(one: Round, node_of: dict[int, int], links: Links) -> float:
    leaving: dict[int, float] = defaultdict(float)
    entering: dict[int, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)
    for sender, receiver, size in one.messages:
        if node_of[sender] == node_of[receiver]:
            inside[node_of[sender]] += size
        else:
            leaving[node_of[sender]] += size
            entering[node_of[receiver]] += size
    # If fewer than half of the ranks send, they neither saturate links nor occupy the processors.
    senders = len({sender for sender, _, _ in one.messages})
    is_busy = 2 * senders >= len(node_of)
    network, node = (links.network, links.node) if is_busy else (links.network_alone, links.node_alone)
    if is_busy and len(one.messages) > senders * len(node_of) / 2:  # each rank sends to most others
        network = links.network_spread
    across = network.seconds(max((*leaving.values(), *entering.values()), default=0.0))
    within = node.seconds(max(inside.values(), default=0.0))
    if across and within:  # the measured network time already includes the latency of a node whose ranks all send
        within -= node.latency_s
    transfer, folding = max(across, within), one.folded_bytes * links.fold_s_per_byte
    return one.repeats * (max(transfer, folding) if one.overlaps else transfer + folding)
