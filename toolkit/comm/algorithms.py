"""The table of all-reduce algorithms. All have the same signature, so that callers can measure and select them by name.

torch is imported only when an algorithm runs, because login nodes read the names, layouts and schedules without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from toolkit.comm.cost import schedules
from toolkit.comm.cost.schedules import Schedule
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    import torch

    from toolkit.comm.peers import Peers

    # Reduces `data` in place over all peers; all ranks get bitwise the same result. `data` is contiguous, of shape
    # (elements,) and not empty; `reductions.to_working` determines its dtype and the op (sum, min, max, product).
    AllReduce = Callable[[torch.Tensor, str, Peers], None]


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce algorithm: a function in a module of this package.

    `schedule` models the messages of each round. `needs` is what `Peers` must provide: "" (nothing), "nodes", or
    "even nodes".
    """

    module: str
    function: str
    schedule: Schedule
    needs: str = ""

    @property
    def run(self) -> AllReduce:
        """The function that runs the algorithm."""
        found: AllReduce = getattr(importlib.import_module(f"toolkit.comm.{self.module}"), self.function)
        return found


def hierarchical_all_reduce(data: torch.Tensor, op: str, peers: Peers) -> None:
    """All-reduce by a reduce-scatter in the node, an all-reduce across nodes and an all-gather in the node."""
    assert peers.reducer is not None
    peers.reducer.all_reduce(data, op)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "flat": Algorithm("one_hop", "flat_all_reduce", schedules.overlapped_ring),
        "ring": Algorithm("ring", "ring_all_reduce", schedules.ring),
        "double-buffered ring": Algorithm("ring", "double_buffered_ring_all_reduce", schedules.overlapped_ring),
        "pipelined ring": Algorithm("ring", "pipelined_ring_all_reduce", schedules.overlapped_ring),
        "tree": Algorithm("tree", "tree_all_reduce", schedules.tree),
        "direct": Algorithm("one_hop", "direct_all_reduce", schedules.direct),
        "leader": Algorithm("one_hop", "leader_all_reduce", schedules.leader, needs="nodes"),
        "hierarchical": Algorithm("algorithms", "hierarchical_all_reduce", schedules.hierarchical, needs="even nodes"),
    }
)


def layouts_allow(name: str, nodes: int, ranks_per_node: int) -> bool:
    """Return whether the algorithm can run on `nodes` nodes with `ranks_per_node` ranks each, if they are known."""
    return ALGORITHMS[name].needs != "even nodes" or (nodes > 1 and ranks_per_node > 1)


def available(peers: Peers) -> tuple[str, ...]:
    """Return the names of the algorithms that these peers can run."""
    have = {"": True, "nodes": bool(peers.nodes), "even nodes": peers.reducer is not None}
    return tuple(name for name, algorithm in ALGORITHMS.items() if have[algorithm.needs])


def find_algorithm(name: str, peers: Peers) -> Algorithm:
    """Return the algorithm called `name`, if these peers can run it.

    Raises:
        ToolkitError: the name is unknown, or the layout of ranks does not allow the algorithm.
    """
    if name not in ALGORITHMS:
        raise ToolkitError(f"unknown all-reduce algorithm {name!r}", fix=f"use one of {', '.join(ALGORITHMS)}")
    if name not in available(peers):
        known = "the nodes of the ranks are unknown" if not peers.nodes else "the layout of the ranks differs"
        needs = (
            "the node of each rank"
            if ALGORITHMS[name].needs == "nodes"
            else ("two or more nodes with the same number of ranks, two or more each, and a group of all ranks")
        )
        raise ToolkitError(
            f"all-reduce algorithm {name!r} requires {needs}, but {known}",
            fix=f"pass topology=gather_topology(world) to Communicator, or use one of {', '.join(available(peers))}",
        )
    return ALGORITHMS[name]
