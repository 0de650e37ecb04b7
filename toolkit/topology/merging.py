"""Merge the facts of nodes; the result does not depend on their order."""

from collections.abc import Iterable
from dataclasses import replace

from toolkit.topology.facts import Hardware, NodeFacts, unknown
from toolkit.topology.names import by_numbers
from toolkit.topology.probe import unknown_hardware

__all__ = ["in_order_of_names", "merge_nodes"]


def merge_nodes(reported: Iterable[NodeFacts]) -> tuple[dict[str, NodeFacts], list[str]]:
    """Return (node by host, conflicts). Nodes with equal hardware share one `Hardware` object.

    If a host reports two different sets of facts, all its facts are unknown, since either set may be correct.
    """
    # Compare ids first, because comparing values is slow. `shared` keeps the objects, so that no id is reused.
    shared: dict[int, tuple[Hardware, Hardware]] = {}
    first_equal: dict[Hardware, Hardware] = {}
    nodes: dict[str, NodeFacts] = {}
    conflicts: set[str] = set()
    contested: set[str] = set()
    for node in reported:
        host, kind = node.host.value, node.hardware
        if host is None:
            conflicts.add("a node is omitted because its name is unknown")
            continue
        if id(kind) not in shared:
            shared[id(kind)] = (kind, first_equal.setdefault(kind, kind))
        node = replace(node, hardware=shared[id(kind)][1])
        if nodes.setdefault(host, node) != node:
            contested.add(host)
    for host in contested:
        conflicts.add(f"{host} reported conflicting hardware information, so toolkit ignores all of it")
        reason = unknown("topology", "the node reported conflicting hardware information")
        nodes[host] = NodeFacts(
            replace(nodes[host].host, source="topology"), reason, unknown_hardware(reason.source, reason.missing)
        )
    return nodes, sorted(conflicts)


def in_order_of_names(nodes: dict[str, NodeFacts]) -> tuple[NodeFacts, ...]:
    """Return the nodes sorted by name, with node2 before node10."""
    return tuple(nodes[host] for host in sorted(nodes, key=by_numbers))
