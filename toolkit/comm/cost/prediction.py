"""How long an all-reduce takes by a model of the links: latency and bandwidth by size, in a node and between nodes.

A round takes as long as the busiest part of the machine: a node's way out, its way in, or what its ranks tell one another.
Alpha-beta models of this kind: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); for
collectives R. Thakur et al., IJHPCA 19(1), 2005; the sharing of a node's link among its ranks as in Gropp, Olson and
Samfass, "Modeling MPI communication performance on SMP nodes", EuroMPI 2016.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from toolkit.comm.algorithms import ALGORITHMS
from toolkit.comm.cost.lines import Line
from toolkit.comm.cost.schedules import RankGroups, Round, Stages


@dataclass(frozen=True)
class Links:
    """What was measured: seconds by the bytes that cross a node's link, or go about in a node, when all ranks talk.

    `network` and `node` are of all ranks at once, each to one other, `network_spread` of each to all on other nodes;
    `network_alone` and `node_alone` are of one pair. `fold_s_per_byte` is what adding up takes when all ranks do it.
    """

    network: Line
    network_spread: Line
    network_alone: Line
    node: Line
    node_alone: Line
    fold_s_per_byte: float


LINKS = ("network", "network_spread", "network_alone", "node", "node_alone")


def predict(algorithm: str, size_bytes: float, nodes: RankGroups, links: Links) -> float:
    """Seconds of an all-reduce of so many bytes on these nodes.

    Raises:
        KeyError: nothing is known of an algorithm of that name.
    """
    return seconds_of(ALGORITHMS[algorithm].schedule(size_bytes, nodes), nodes, links)


def seconds_of(schedule: Stages, nodes: RankGroups, links: Links) -> float:
    """The first segment goes through all stages; after it, the slowest stage gives one segment at a time."""
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
    # Few speak where fewer than half of the ranks do: the others neither fill links nor take processors.
    senders = len({sender for sender, _, _ in one.messages})
    together = 2 * senders >= len(node_of)
    network, node = (links.network, links.node) if together else (links.network_alone, links.node_alone)
    if together and len(one.messages) > senders * len(node_of) / 2:  # each to most others
        network = links.network_spread
    across = network.seconds(max((*leaving.values(), *entering.values()), default=0.0))
    within = node.seconds(max(inside.values(), default=0.0))
    if across and within:  # the latency of ranks that all talk is in the network's time
        within -= node.latency_s
    talking, folding = max(across, within), one.folded_bytes * links.fold_s_per_byte
    return one.repeats * (max(talking, folding) if one.overlaps else talking + folding)
