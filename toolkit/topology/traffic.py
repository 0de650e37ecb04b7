"""Predict the communication time of the groups of a mesh on the tiers of a cluster, and the slowest links.

The model treats each group as a ring in the order of its ranks, and assumes that all groups of a dimension communicate
concurrently. Each edge of a ring of n ranks carries 2 (n-1)/n S for an all-reduce of S bytes, (n-1)/n S for an
all-gather, a reduce-scatter or an all-to-all, and S for sending to the next rank. (R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005.) The ranks of a group share its links.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.topology.tiers import Tiers

__all__ = ["Traffic"]

Exchange = Literal["all-reduce", "gather-scatter", "all-to-all", "send"]


@dataclass(frozen=True)
class Traffic:
    """The communication of one mesh dimension in a step: `payload_bytes` per rank in `calls` operations in total.

    `source` names the origin of the figures.
    """

    exchange: Exchange
    payload_bytes: float
    calls: int = 1
    source: str = ""


@dataclass(frozen=True)
class DimensionCost:
    """The cost of one mesh dimension for a placement.

    Attributes:
        groups_at: for each tier, the number of groups that fit into it but not into a finer one.
        worst: the coarsest tier that a group needs.
        busiest: the tier whose links take the longest.
        seconds: the predicted time per step.
    """

    groups: int
    size: int
    groups_at: tuple[int, ...]
    worst: int
    busiest: int
    seconds: float


def edge_bytes(traffic: Traffic, size: int) -> float:
    """Return the bytes that cross one edge of a ring of `size` ranks in a step."""
    if size < 2:
        return 0.0
    share = (size - 1) / size
    return (
        traffic.payload_bytes
        * {"all-reduce": 2 * share, "gather-scatter": share, "all-to-all": share, "send": 1.0}[traffic.exchange]
    )


def dimension_cost(tiers: Tiers, groups: np.ndarray, traffic: Traffic) -> DimensionCost:
    """Return the cost of the groups of one dimension; `groups` contains ranks, (groups, members)."""
    count, size = groups.shape
    common = tiers.finest_common(groups)
    worst = int(common.max()) if size > 1 else 0
    over_edge = edge_bytes(traffic, size)
    steps = {"all-reduce": 2 * (size - 1), "send": 1}.get(traffic.exchange, size - 1) * traffic.calls
    busiest, slowest_s = worst, 0.0
    if over_edge:
        followers = np.roll(groups, -1, axis=1)
        for number, level in enumerate(tiers.levels):
            inside = tiers.levels[number - 1].group_of if number else np.arange(tiers.size)
            leaving = inside[groups] != inside[followers]
            seconds = 0.0
            if level.pairs and (whole := common == number).any():
                seconds = over_edge / float(level.pairs.bytes_per_s(groups[whole]).min())
                leaving[whole] = False
            # The ranks of a finer group share its outgoing links: their total is this tier's bandwidth times the number of ranks.
            load = np.bincount(inside[groups][leaving], minlength=int(inside.max()) + 1) * over_edge
            seconds = max(seconds, float((load / np.bincount(inside) / level.link.bytes_per_s).max()))
            if seconds > slowest_s:
                busiest, slowest_s = number, seconds
    latency_s = steps * tiers.levels[worst].link.latency_s if size > 1 else 0.0
    at = tuple(int(n) for n in np.bincount(common, minlength=len(tiers.levels)))
    return DimensionCost(count, size, at, worst, busiest, slowest_s + latency_s)
