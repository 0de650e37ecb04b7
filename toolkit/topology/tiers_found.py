"""The tiers of a cluster from the facts of its nodes. What is unknown makes a coarser tier, and a line that says so."""

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


def tiers_of_topology(topology: Topology, ranks_per_node: int | None = None, notes: list[str] | None = None) -> Tiers:
    """NVLink cliques, or PCIe switches and sockets, then nodes, leaves and the cluster.

    Args:
        topology: its ranks, each on the GPU that it named, or that of its local rank where no rank of the node did.
            Without ranks, one for each GPU, nodes in their order.
        ranks_per_node: so many on each node instead, whatever ranks the topology has.
        notes: told what is unknown, and what follows.

    Raises:
        ToolkitError: there is no node.
    """
    nodes = topology.nodes
    if not nodes:
        raise ToolkitError("no node has told its facts", where="topology", fix="run `toolkit topo show` on each node")
    unknown = Notes()
    kinds = kinds_of(nodes, unknown)
    places = places_of(topology, ranks_per_node, unknown)
    racks = _racks(nodes, kinds, unknown)
    leaves = _leaves(nodes, racks, unknown)
    # A rank on no known node is alone.
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
    found: dict[Hashable, Hashable] = {}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        told = {fact.value for fact in node.gpu_fabrics}
        if None in told and kind.cliques:
            missing = next(fact.missing for fact in node.gpu_fabrics if fact.value is None)
            notes.add(f"the NVLink fabric is unknown ({missing}), so that NVLink is taken to end at the node", node)
        elif len(told - {None}) > 1:
            notes.add("its GPUs are in several NVLink fabrics, so that NVLink is taken to end at the node", node)
        elif told and told.isdisjoint({None, NO_FABRIC}):
            found[number] = ("fabric", told.pop())
    members = Counter(found.values())
    racks = {number: label for number, label in found.items() if members[label] > 1}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        # One whose GPUs are all in one clique has nothing to tell apart: its tier is the node.
        if racks and number not in racks and kind.cliques and not kind.one_clique:
            notes.add("NVLink joins other nodes, not this one; its own NVLink is not told apart", node)
    return racks


def _leaves(nodes: Sequence[NodeFacts], racks: Mapping[Hashable, Hashable], notes: Notes) -> dict[Hashable, Hashable]:
    """The leaf of each node. Leaves that one rack lies in are one, since a tier lies in one of the next."""
    leaves: dict[Hashable, Hashable] = {}
    for number, node in enumerate(nodes):
        path = node.switches.value
        leaf = path.leaf if path else None
        leaves[number] = ("unknown", number) if leaf is None else leaf
        if leaf is None:
            reason = "Slurm names no switch above it" if path else node.switches.missing
            notes.add(f"the leaf switch is unknown ({reason}), so that it meets others in the cluster", node)
    if all(isinstance(leaf, tuple) for leaf in leaves.values()):
        return {}
    members: dict[Hashable, list[Hashable]] = {}
    for member, label in racks.items():
        members.setdefault(label, []).append(member)
    for rack in members.values():
        met = {leaves[member] for member in rack}
        if len(met) > 1:
            notes.add("an NVLink clique has nodes below several leaf switches, which count as one leaf")
            joined = min(met, key=str)
            leaves = {member: joined if leaf in met else leaf for member, leaf in leaves.items()}
    return leaves
