"""Derive the tiers of a cluster from the facts of its nodes. An unknown fact makes tiers coarser and adds a note."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NO_FABRIC, NodeFacts, Topology
from toolkit.topology.links.nodes import MOST_NVLINKS, Groups, gpu_links, links_within, nvlink_count
from toolkit.topology.links.nominal import nvlink_bytes_per_s, pcie
from toolkit.topology.links.tiers import clique_link, fabric_link, node_link, slowest
from toolkit.topology.names import Notes
from toolkit.topology.node_kinds import NodeKind, Place, group_at, kinds_of, places_of
from toolkit.topology.tiers import Link, Tiers, tiers_of

__all__ = ["Column", "tiers_inside", "tiers_of_topology"]

Column = tuple[str, Sequence[object], Link]  # name of a tier, group label of each rank, link within the tier


def tiers_inside(
    nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes
) -> list[Column]:
    """Return the tiers below the node, finest first. `kinds[number]` is the kind of node `number`."""
    if any(kind.cliques for kind in kinds):
        for node, kind in zip(nodes, kinds, strict=True):
            if kind.hardware.gpus and not kind.cliques:
                notes.add("no NVLink is known, but other nodes have it, so toolkit assumes PCIe between its GPUs", node)
        return [("clique", _labels(kinds, places, lambda kind: kind.cliques), clique_link(kinds, between_nodes=False))]
    columns: list[Column] = []
    with_switches = [kind for kind in dict.fromkeys(kinds) if kind.switches]
    if with_switches:
        links = [_pcie_within(kind, kind.switches) for kind in with_switches]
        columns.append(("switch", _labels(kinds, places, lambda kind: kind.switches), slowest(links)))
    for node, kind in zip(nodes, kinds, strict=True):
        if kind.sockets is None:
            notes.add(f"{kind.sockets_missing}, so toolkit does not group its GPUs by socket", node)
    if any(kind.sockets and len(kind.sockets) > 1 for kind in kinds):
        links = [_pcie_within(kind, kind.sockets) for kind in dict.fromkeys(kinds) if kind.sockets]
        columns.append(("socket", _labels(kinds, places, lambda kind: kind.sockets), slowest(links)))
    return columns


def _labels(
    kinds: Sequence[NodeKind], places: Sequence[Place], groups_of: Callable[[NodeKind], Groups | None]
) -> list[Hashable]:
    """Return the group label of each rank in a tier below the node; a GPU that is in no group gets its own label."""
    labels: list[Hashable] = []
    for rank, place in enumerate(places):
        group = None
        if place.node is not None and place.gpu is not None:
            group = group_at(groups_of(kinds[place.node]) or (), place.gpu)
        # If the sockets of a node are unknown, each GPU gets its own label, so their finest common tier is the node.
        labels.append(("alone", rank) if group is None else (place.node, group))
    return labels


def _pcie_within(kind: NodeKind, groups: Groups) -> Link:
    """Return the slowest path between two GPUs of a group; the path over a host bridge if all groups have one GPU."""
    links = [link for group in groups for link in links_within(kind.hardware, group)]
    return pcie(kind.hardware, links or ["PHB"])


@dataclass(frozen=True, eq=False)
class PairLinks:
    """The numbers of NVLinks between ranks of a clique inside a node.

    Attributes:
        counts: (kinds, places, places), the number of links between two GPUs, by their indexes on a kind of node.
        kind_of, place_of: (ranks,), the kind of node and the GPU index of each rank.
        link_bytes_per_s: (kinds,), the rate per link and direction.
    """

    counts: np.ndarray
    kind_of: np.ndarray
    place_of: np.ndarray
    link_bytes_per_s: np.ndarray

    def bytes_per_s(self, groups: np.ndarray) -> np.ndarray:
        """Return the rate from a rank to the rest of its group, (groups,), limited by the pair with the fewest links.

        Args:
            groups: (groups, members) with ranks, at least two members, each group within one clique.
        """
        kinds, places = self.kind_of[groups[:, 0]], self.place_of[groups]
        others = groups.shape[1] - 1
        between = self.counts[kinds[:, None, None], places[:, :, None], places[:, None, :]]
        least = np.where(np.eye(others + 1, dtype=bool), MOST_NVLINKS, between).min(axis=(1, 2))
        together = np.where(least * others > MOST_NVLINKS, least, least * others)  # as in `nvlinks_to`
        rates: np.ndarray = together * self.link_bytes_per_s[kinds]
        return rates


def pair_links(kinds: Sequence[NodeKind], places: Sequence[Place]) -> PairLinks:
    """Return the links of these ranks; `kinds[number]` is the kind of node `number`."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    most = max(len(kind.gpus) for kind in numbers)
    counts = np.zeros((len(numbers), most, most), dtype=np.int64)
    for kind, number in numbers.items():
        for one, other, link in gpu_links(kind.hardware):
            counts[number, one, other] = counts[number, other, one] = nvlink_count(link)
    return PairLinks(
        counts,
        np.array([0 if place.node is None else numbers[kinds[place.node]] for place in places], dtype=np.int64),
        np.array([place.gpu or 0 for place in places], dtype=np.int64),
        np.array([nvlink_bytes_per_s(kind.hardware) for kind in numbers]),
    )


def tiers_of_topology(topology: Topology, ranks_per_node: int | None = None, notes: list[str] | None = None) -> Tiers:
    """Return the tiers: NVLink cliques, or PCIe switches and sockets, then nodes, leaf switches and the cluster.

    Args:
        topology: each rank is on the GPU that it reported, or if no rank of the node reported a GPU, on the GPU with its
            local rank as index. If the topology has no ranks, each GPU gets one, in the order of nodes.
        ranks_per_node: the number of ranks on each node, instead of the ranks of the topology.
        notes: receives a line for each unknown fact with its consequence.

    Raises:
        ToolkitError: the topology contains no nodes.
    """
    nodes = topology.nodes
    if not nodes:
        raise ToolkitError(
            "no node has reported its topology", where="topology", fix="run `toolkit topo show` on each node"
        )
    unknown = Notes()
    kinds = kinds_of(nodes, unknown)
    places = places_of(topology, ranks_per_node, unknown)
    racks = _racks(nodes, kinds, unknown)
    leaves = _leaves(nodes, racks, unknown)
    # A rank with an unknown node gets a group of its own.
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
    """Return the NVLink fabric clique of each node that is in one clique with another node."""
    fabric_of: dict[Hashable, Hashable] = {}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        fabrics = {fact.value for fact in node.gpu_fabrics}
        if None in fabrics and kind.cliques:
            missing = next(fact.missing for fact in node.gpu_fabrics if fact.value is None)
            notes.add(f"the NVLink fabric is unknown ({missing}), so toolkit assumes no NVLink to other nodes", node)
        elif len(fabrics - {None}) > 1:
            notes.add("its GPUs are in several NVLink fabrics, so toolkit assumes no NVLink to other nodes", node)
        elif fabrics and fabrics.isdisjoint({None, NO_FABRIC}):
            fabric_of[number] = ("fabric", fabrics.pop())
    members = Counter(fabric_of.values())
    racks = {number: label for number, label in fabric_of.items() if members[label] > 1}
    for number, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        # No note is needed for a node whose GPUs form one clique, since that clique is the whole node.
        if racks and number not in racks and kind.cliques and not kind.one_clique:
            notes.add("NVLink connects other nodes but not this one, so toolkit ignores the cliques inside it", node)
    return racks


def _leaves(nodes: Sequence[NodeFacts], racks: Mapping[Hashable, Hashable], notes: Notes) -> dict[Hashable, Hashable]:
    """Return the leaf switch of each node; the leaves of one rack are merged, since a clique must be within one leaf."""
    leaves: dict[Hashable, Hashable] = {}
    for number, node in enumerate(nodes):
        path = node.switches.value
        leaf = path.leaf if path else None
        leaves[number] = ("unknown", number) if leaf is None else leaf
        if leaf is None:
            reason = "Slurm reports no switch above the node" if path else node.switches.missing
            notes.add(f"the leaf switch is unknown ({reason}), so toolkit assumes a leaf switch of its own", node)
    if all(isinstance(leaf, tuple) for leaf in leaves.values()):
        return {}
    members: dict[Hashable, list[Hashable]] = {}
    for member, label in racks.items():
        members.setdefault(label, []).append(member)
    for rack in members.values():
        rack_leaves = {leaves[member] for member in rack}
        if len(rack_leaves) > 1:
            notes.add("an NVLink clique has nodes below several leaf switches, which toolkit treats as one leaf")
            merged = min(rack_leaves, key=str)
            leaves = {member: merged if leaf in rack_leaves else leaf for member, leaf in leaves.items()}
    return leaves
