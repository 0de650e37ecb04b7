"""What the groups of a mesh cost on the tiers of a cluster: worst links and predicted times, by plain arithmetic.

Each group is taken as a ring in the order of its ranks, all groups of a dimension at once. What a ring carries over an
edge follows the exchange: 2 (n-1)/n S for an all-reduce of S bytes on n ranks, (n-1)/n S for an all-gather, a
reduce-scatter or an all-to-all, S for sending on. (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005.) The ranks of a group of a tier share what leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.topology.tiers import Tiers

Exchange = Literal["all-reduce", "gather-scatter", "all-to-all", "send"]


@dataclass(frozen=True)
class Traffic:
    """What one dimension of the mesh exchanges in a step: `payload_bytes` a rank, in `calls` exchanges.

    `source` says where the figures are from.
    """

    exchange: Exchange
    payload_bytes: float
    calls: int = 1
    source: str = ""


@dataclass(frozen=True)
class DimensionCost:
    """What one dimension costs on a placement.

    `groups_at[t]` counts the groups whose members meet at tier t and no finer one; `worst` is the coarsest of them.
    `seconds` is of one step, `busiest` the tier whose links take that long.
    """

    groups: int
    size: int
    groups_at: tuple[int, ...]
    worst: int
    busiest: int
    seconds: float


def edge_bytes(traffic: Traffic, size: int) -> float:
    """The bytes that cross one edge of a ring of `size` ranks in a step."""
    if size < 2:
        return 0.0
    share = (size - 1) / size
    return (
        traffic.payload_bytes
        * {"all-reduce": 2 * share, "gather-scatter": share, "all-to-all": share, "send": 1.0}[traffic.exchange]
    )


def dimension_cost(tiers: Tiers, groups: np.ndarray, traffic: Traffic) -> DimensionCost:
    """The cost of the groups of one dimension, (groups, members) of ranks."""
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
            # What leaves a finer group is shared by all ranks in it, each of which has this tier's bandwidth.
            load = np.bincount(inside[groups][leaving], minlength=int(inside.max()) + 1) * over_edge
            seconds = max(seconds, float((load / np.bincount(inside) / level.link.bytes_per_s).max()))
            if seconds > slowest_s:
                busiest, slowest_s = number, seconds
    latency_s = steps * tiers.levels[worst].link.latency_s if size > 1 else 0.0
    at = tuple(int(n) for n in np.bincount(common, minlength=len(tiers.levels)))
    return DimensionCost(count, size, at, worst, busiest, slowest_s + latency_s)
