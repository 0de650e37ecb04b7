"""Tiers finer than a node: NVLink cliques, or where there is no NVLink, PCIe switches and sockets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from toolkit.topology.facts import NodeFacts
from toolkit.topology.links.nodes import Groups, links_within
from toolkit.topology.links.nominal import pcie
from toolkit.topology.links.tiers import clique_link, slowest
from toolkit.topology.names import Notes
from toolkit.topology.node_kinds import NodeKind, group_at
from toolkit.topology.rank_places import Place
from toolkit.topology.tiers import Link

Column = tuple[str, Sequence[object], Link]  # a tier's name, the label of each rank's group, the link in it


def tiers_inside(
    nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes
) -> list[Column]:
    """The tiers of these nodes, the finest first. `kinds[number]` is the kind of node `number`."""
    if any(kind.cliques for kind in kinds):
        for node, kind in zip(nodes, kinds, strict=True):
            if kind.hardware.gpus and not kind.cliques:
                notes.add("no NVLink is known, other nodes have it: its GPUs meet in the node alone", node)
        return [("clique", _labels(kinds, places, lambda kind: kind.cliques), clique_link(kinds, between_nodes=False))]
    columns: list[Column] = []
    with_switches = [kind for kind in dict.fromkeys(kinds) if kind.switches]
    if with_switches:
        links = [_pcie_within(kind, kind.switches) for kind in with_switches]
        columns.append(("switch", _labels(kinds, places, lambda kind: kind.switches), slowest(links)))
    for node, kind in zip(nodes, kinds, strict=True):
        if kind.sockets is None:
            notes.add(f"{kind.sockets_missing}, so that sockets are not told apart", node)
    if any(kind.sockets and len(kind.sockets) > 1 for kind in kinds):
        links = [_pcie_within(kind, kind.sockets) for kind in dict.fromkeys(kinds) if kind.sockets]
        columns.append(("socket", _labels(kinds, places, lambda kind: kind.sockets), slowest(links)))
    return columns


def _labels(
    kinds: Sequence[NodeKind], places: Sequence[Place], groups_of: Callable[[NodeKind], Groups | None]
) -> list[Hashable]:
    """The group of each rank in a tier below the node. A GPU in no clique, or behind no switch, is alone there."""
    labels: list[Hashable] = []
    for number, place in enumerate(places):
        group = None
        if place.node is not None and place.gpu is not None:
            group = group_at(groups_of(kinds[place.node]) or (), place.gpu)
        # Of a node without known sockets each GPU is alone there: they meet in the node.
        labels.append(("alone", number) if group is None else (place.node, group))
    return labels


def _pcie_within(kind: NodeKind, groups: Groups) -> Link:
    """The slowest way between two GPUs of a group; GPUs that are alone on their sockets stand for a host bridge."""
    links = [link for group in groups for link in links_within(kind.hardware, group)]
    return pcie(kind.hardware, links or ["PHB"])
