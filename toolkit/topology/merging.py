"""Merge the facts of nodes; the result does not depend on their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toolkit.topology.facts import Hardware, NodeFacts, unknown
from toolkit.topology.names import by_numbers
from toolkit.topology.probe import unknown_hardware

__all__ = ["in_order_of_names", "merge_nodes"]


def merge_nodes(reported: Iterable[NodeFacts]) -> tuple[dict[str, NodeFacts], list[str]]:
    """(node by host, conflicts). Nodes with equal hardware share one object.

    If a host reports two different sets of facts, all its facts are unknown, since either set may be the right one.
    """
    share = _Sharing()
    nodes: dict[str, NodeFacts] = {}
    contested: set[str] = set()
    conflicts: set[str] = set()
    for node in reported:
        host = node.host.value
        if host is None:
            conflicts.add("a node is omitted because its name is unknown")
            continue
        shared = share(node)
        if nodes.setdefault(host, shared) != shared:
            contested.add(host)
    for host in contested:
        conflicts.add(f"{host} reported two different sets of facts, so all its facts are unknown")
        reason = unknown("topology", "the node reported two different sets of facts")
        nodes[host] = NodeFacts(
            replace(nodes[host].host, source="topology"), reason, unknown_hardware(reason.source, reason.missing)
        )
    return nodes, sorted(conflicts)


class _Sharing:
    """Replaces the hardware of a node by the first object that equals it."""

    def __init__(self) -> None:
        # The identity comes first because comparing is slow. The object is kept so that Python does not reuse its id.
        self.by_id: dict[int, tuple[Hardware, Hardware]] = {}
        self.by_value: dict[Hardware, Hardware] = {}

    def __call__(self, node: NodeFacts) -> NodeFacts:
        entry = self.by_id.get(id(node.hardware))
        if entry is None:
            entry = (node.hardware, self.by_value.setdefault(node.hardware, node.hardware))
            self.by_id[id(node.hardware)] = entry
        _, shared = entry
        return node if shared is node.hardware else replace(node, hardware=shared)


def in_order_of_names(nodes: dict[str, NodeFacts]) -> tuple[NodeFacts, ...]:
    """The nodes, sorted by the numbers in their names."""
    return tuple(nodes[host] for host in sorted(nodes, key=by_numbers))
