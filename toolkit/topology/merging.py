"""Bring what nodes told together, whatever the order in which they told it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toolkit.topology.facts import Hardware, NodeFacts, unknown
from toolkit.topology.names import by_numbers
from toolkit.topology.probe import unknown_hardware


def merge_nodes(told: Iterable[NodeFacts]) -> tuple[dict[str, NodeFacts], list[str]]:
    """(node by host, what is wrong). Equal hardware stands in memory once.

    A host that tells two different things is unknown: nobody says which of them is right.
    """
    share = _Sharing()
    nodes: dict[str, NodeFacts] = {}
    contested: set[str] = set()
    conflicts: set[str] = set()
    for node in told:
        host = node.host.value
        if host is None:
            conflicts.add("a node whose name is unknown is left out")
            continue
        shared = share(node)
        if nodes.setdefault(host, shared) != shared:
            contested.add(host)
    for host in contested:
        conflicts.add(f"{host} told two different things of itself, so that nothing of it is known")
        reason = unknown("topology", "the node told two different things of itself")
        nodes[host] = NodeFacts(
            replace(nodes[host].host, source="topology"), reason, unknown_hardware(reason.source, reason.missing)
        )
    return nodes, sorted(conflicts)


class _Sharing:
    """Gives every node the first of the hardware that equals its own."""

    def __init__(self) -> None:
        # By identity first, since comparing takes long; the object is kept so that no other one gets its identity.
        self.by_id: dict[int, tuple[Hardware, Hardware]] = {}
        self.by_value: dict[Hardware, Hardware] = {}

    def __call__(self, node: NodeFacts) -> NodeFacts:
        known = self.by_id.get(id(node.hardware))
        if known is None:
            known = (node.hardware, self.by_value.setdefault(node.hardware, node.hardware))
            self.by_id[id(node.hardware)] = known
        return node if known[1] is node.hardware else replace(node, hardware=known[1])


def in_order_of_names(nodes: dict[str, NodeFacts]) -> tuple[NodeFacts, ...]:
    """Nodes by the numbers in their names."""
    return tuple(nodes[host] for host in sorted(nodes, key=by_numbers))
