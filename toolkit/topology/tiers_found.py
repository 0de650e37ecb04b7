"""The tiers of a cluster from the facts of its nodes. An unknown fact makes tiers coarser and adds a note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NO_FABRIC, NodeFacts, Topology
from toolkit.topology.links.pairs import pair_links
from toolkit.topology.links.tiers import clique_link, fabric_link, node_link
from toolkit.topology.names import Notes
from toolkit.topology.node_kinds import NodeKind, kinds_of
from toolkit.topology.rank_places import places_of
from toolkit.topology.tiers import Tiers, tiers_of
from toolkit.topology.tiers_inside import Column, tiers_inside

__all__ = ["tiers_of_topology"]


def tiers_of_topology(topology: Topology, ranks_per_node: int | None = None, notes: list[str] | None = None) -> Tiers:
    """NVLink cliques, or PCIe switches and sockets, then nodes, leaves and the cluster.

    Args:
        topology: each rank is on the GPU that it named, or on the GPU of its local rank if no rank of the node named
            one. If the topology has no ranks, each GPU gets one, in the order of nodes.
        ranks_per_node: overrides the ranks of the topology with this number on each node.
        notes: receives a line for each unknown fact and its consequence.

    Raises:
        ToolkitError: the topology has no node.
    """
    nodes = topology.nodes
    if not nodes:
        raise ToolkitError(
            "no node has reported its facts", where="topology", fix="run `toolkit topo show` on each node"
        )
    unknown = Notes()
    kinds = kinds_of(nodes, unknown)
    places = places_of(topology, ranks_per_node, unknown)
    racks = _racks(nodes, kinds, unknown)
    leaves = _leaves(nodes, racks, unknown)
    # A rank whose node is unknown is alone in its group.
    node_of: list[Hashable] = [
        ("alone", rank) if place.node is None else place.node for rank, place in enumerate(places)
    ]
    columns: list[Column] = []
    if racks:
        link = clique_link(kinds, between_nodes=True)
        columns += [("node", node_of, link), ("clique", [racks.get(node, node) for node in node_of], link)]
    else:
        columns += [*tiers_inside(nodes, kinds, places, unknown), ("node", node_of, node_link(kinds))]
    between = fabric_link(nodes, kinds, places, unknown)
    if leaves:
        columns.append(("leaf", [leaves.get(node, node) for node in node_of], between))
    columns.append(("cluster", [0] * len(places), between))
    if notes is not None:
        notes += unknown.lines()
    tiers = tiers_of(columns)
    if columns[0][0] != "clique":
        return tiers
    return Tiers((replace(tiers.levels[0], pairs=pair_links(kinds, places)), *tiers.levels[1:]))


def _racks(nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], notes: Notes) -> dict[Hashable, Hashable]:
    """The NVLink fabric clique of each node that shares one with another node."""
    fabric_of: dict[Hashable, Hashable] = {}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        fabrics = {fact.value for fact in node.gpu_fabrics}
        if None in fabrics and kind.cliques:
            missing = next(fact.missing for fact in node.gpu_fabrics if fact.value is None)
            notes.add(
                f"the NVLink fabric is unknown ({missing}), so toolkit assumes that NVLink ends at the node", node
            )
        elif len(fabrics - {None}) > 1:
            notes.add("its GPUs are in several NVLink fabrics, so toolkit assumes that NVLink ends at the node", node)
        elif fabrics and fabrics.isdisjoint({None, NO_FABRIC}):
            fabric_of[number] = ("fabric", fabrics.pop())
    members = Counter(fabric_of.values())
    racks = {number: label for number, label in fabric_of.items() if members[label] > 1}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        # A node whose GPUs are all in one clique loses no tier: its clique is the node.
        if racks and number not in racks and kind.cliques and not kind.one_clique:
            notes.add("NVLink joins other nodes, not this one, so the cliques inside it are no separate tier", node)
    return racks


def _leaves(nodes: Sequence[NodeFacts], racks: Mapping[Hashable, Hashable], notes: Notes) -> dict[Hashable, Hashable]:
    """The leaf of each node; toolkit merges the leaves of one rack, since a group must be inside one coarser group."""
    leaves: dict[Hashable, Hashable] = {}
    for number, node in enumerate(nodes):
        path = node.switches.value
        leaf = path.leaf if path else None
        leaves[number] = ("unknown", number) if leaf is None else leaf
        if leaf is None:
            reason = "Slurm names no switch above the node" if path else node.switches.missing
            notes.add(f"the leaf switch is unknown ({reason}), so the node shares only the cluster with others", node)
    if all(isinstance(leaf, tuple) for leaf in leaves.values()):
        return {}
    members: dict[Hashable, list[Hashable]] = {}
    for member, label in racks.items():
        members.setdefault(label, []).append(member)
    for rack in members.values():
        rack_leaves = {leaves[member] for member in rack}
        if len(rack_leaves) > 1:
            notes.add("an NVLink clique has nodes below several leaf switches, which count as one leaf")
            merged = min(rack_leaves, key=str)
            leaves = {member: merged if leaf in rack_leaves else leaf for member, leaf in leaves.items()}
    return leaves
