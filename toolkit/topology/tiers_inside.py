"""Tiers finer than a node: NVLink cliques, or PCIe switches and sockets if there is no NVLink."""

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

__all__ = ["Column", "tiers_inside"]

Column = tuple[str, Sequence[object], Link]  # the name of a tier, the label of each rank's group, the link in the tier


def tiers_inside(
    nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes
) -> list[Column]:
    """The tiers of these nodes, the finest first. `kinds[number]` is the kind of node `number`."""
    if any(kind.cliques for kind in kinds):
        for node, kind in zip(nodes, kinds, strict=True):
            if kind.hardware.gpus and not kind.cliques:
                notes.add("its GPUs share only the node: no NVLink is known, but other nodes have it", node)
        return [("clique", _labels(kinds, places, lambda kind: kind.cliques), clique_link(kinds, between_nodes=False))]
    columns: list[Column] = []
    with_switches = [kind for kind in dict.fromkeys(kinds) if kind.switches]
    if with_switches:
        links = [_pcie_within(kind, kind.switches) for kind in with_switches]
        columns.append(("switch", _labels(kinds, places, lambda kind: kind.switches), slowest(links)))
    for node, kind in zip(nodes, kinds, strict=True):
        if kind.sockets is None:
            notes.add(f"{kind.sockets_missing}, so sockets are no separate tier", node)
    if any(kind.sockets and len(kind.sockets) > 1 for kind in kinds):
        links = [_pcie_within(kind, kind.sockets) for kind in dict.fromkeys(kinds) if kind.sockets]
        columns.append(("socket", _labels(kinds, places, lambda kind: kind.sockets), slowest(links)))
    return columns


def _labels(
    kinds: Sequence[NodeKind], places: Sequence[Place], groups_of: Callable[[NodeKind], Groups | None]
) -> list[Hashable]:
    """The group of each rank in a tier below the node; a GPU without a clique or a switch is alone in its group."""
    labels: list[Hashable] = []
    for rank, place in enumerate(places):
        group = None
        if place.node is not None and place.gpu is not None:
            group = group_at(groups_of(kinds[place.node]) or (), place.gpu)
        # If the sockets of a node are unknown, each of its GPUs is alone, and their finest common tier is the node.
        labels.append(("alone", rank) if group is None else (place.node, group))
    return labels


def _pcie_within(kind: NodeKind, groups: Groups) -> Link:
    """The slowest path between two GPUs of a group; if each GPU is alone on its socket, the link of a host bridge."""
    links = [link for group in groups for link in links_within(kind.hardware, group)]
    return pcie(kind.hardware, links or ["PHB"])
