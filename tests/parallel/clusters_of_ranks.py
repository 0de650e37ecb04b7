"""Topologies of ranks on machines that do not stand here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.topology.facts import Topology
from toolkit.topology.machine_facts import topology_of_machine


def topology_of_ranks(machine: str, leaves: Sequence[int], each: int, dealt: Sequence[int] | None = None) -> Topology:
    """`each` ranks on every node, `dealt[place]` the rank at a place, nodes first; by default ranks fill node by node."""
    nodes = topology_of_machine(machine, leaves).nodes
    ranks = dealt if dealt is not None else range(len(nodes) * each)
    by_host = {f"node{n}": tuple(sorted(ranks[n * each : (n + 1) * each])) for n in range(len(nodes))}
    in_order = dict(sorted(by_host.items(), key=lambda item: item[1][0]))
    by_name = {node.host.value: node for node in nodes}
    return replace(
        topology_of_machine(machine, leaves), nodes=tuple(by_name[host] for host in in_order), ranks_by_host=in_order
    )


def in_turn(nodes: int, each: int) -> list[int]:
    """Ranks dealt to the nodes in turn, as by --distribution=cyclic."""
    return [node + nodes * local for node in range(nodes) for local in range(each)]
