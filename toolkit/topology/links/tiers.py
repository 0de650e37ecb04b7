"""The link of each tier for a rank: that of the slowest kind of node, since a ring waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.topology.facts import NodeFacts
from toolkit.topology.links.nics import assumed_share, nic_share
from toolkit.topology.links.nodes import links_within, nvlinks_leaving
from toolkit.topology.links.nominal import nvlink_of_group, nvlinks, pcie
from toolkit.topology.names import Notes
from toolkit.topology.node_kinds import NodeKind
from toolkit.topology.rank_places import Place
from toolkit.topology.tiers import Link


def slowest(links: Iterable[Link]) -> Link:
    """The link with the lowest bandwidth."""
    return min(links, key=lambda link: link.bytes_per_s)


def clique_link(kinds: Sequence[NodeKind], *, between_nodes: bool) -> Link:
    """NVLink in a clique, inside a node or across nodes."""
    links = [
        # A fabric that connects nodes has switches, even if a node has few GPUs.
        nvlink_of_group(kind.hardware, links_within(kind.hardware, group), 2 if between_nodes else len(group))
        for kind in dict.fromkeys(kinds)
        for group in kind.cliques
    ]
    return slowest(links) if links else nvlink_of_group(kinds[0].hardware, [], 2)


def node_link(kinds: Sequence[NodeKind]) -> Link:
    """The path between GPUs of a node that share no finer group."""
    return slowest(_across(kind) for kind in dict.fromkeys(kinds))


def _across(kind: NodeKind) -> Link:
    links = links_within(kind.hardware, kind.gpus)
    if kind.one_clique:
        return nvlink_of_group(kind.hardware, links, len(kind.gpus))
    # On a DGX-1 each GPU has a link to one of the other four: rings use these links, and NCCL forwards through the GPU
    # at their end if two GPUs have none.
    leaving = nvlinks_leaving(kind.hardware, kind.cliques)
    return nvlinks(kind.hardware, leaving) if leaving else pcie(kind.hardware, links)


def fabric_link(nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes) -> Link:
    """The share of the nodes' NICs for each rank."""
    gpus_of: dict[int, list[int | None]] = {}
    for place in places:
        if place.node is not None:
            gpus_of.setdefault(place.node, []).append(place.gpu)
    shares: dict[tuple[NodeKind, tuple[int | None, ...]], Link | None] = {}
    for number, gpus in gpus_of.items():
        key = (kinds[number], tuple(gpus))
        if key not in shares:
            shares[key] = nic_share(kinds[number].hardware, gpus)
        if shares[key] is None:
            notes.add("the rate of its NICs is unknown", nodes[number])
    links = [link or assumed_share(len(gpus)) for (_, gpus), link in shares.items()]
    return slowest(links) if links else assumed_share(1)
