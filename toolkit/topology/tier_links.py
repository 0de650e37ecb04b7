"""What a link of each tier carries for a rank: the slowest of all kinds of node, since a ring waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.topology.facts import NodeFacts
from toolkit.topology.nic_share import assumed_share, nic_share
from toolkit.topology.node_kinds import NodeKind
from toolkit.topology.node_links import links_within, nvlinks_leaving
from toolkit.topology.nominal_links import nvlink_of_group, nvlinks, pcie
from toolkit.topology.notes import Notes
from toolkit.topology.rank_places import Place
from toolkit.topology.tiers import Link


def slowest(links: Iterable[Link]) -> Link:
    """The link of the least bandwidth."""
    return min(links, key=lambda link: link.bytes_per_s)


def clique_link(kinds: Sequence[NodeKind], *, between_nodes: bool) -> Link:
    """NVLink in a clique, inside of nodes or of several nodes."""
    found = [
        # A fabric that joins nodes has switches, whatever few GPUs one node has.
        nvlink_of_group(kind.hardware, links_within(kind.hardware, group), 2 if between_nodes else len(group))
        for kind in dict.fromkeys(kinds)
        for group in kind.cliques
    ]
    return slowest(found) if found else nvlink_of_group(kinds[0].hardware, [], 2)


def node_link(kinds: Sequence[NodeKind]) -> Link:
    """The way between GPUs of a node that are in no finer group together."""
    return slowest(_across(kind) for kind in dict.fromkeys(kinds))


def _across(kind: NodeKind) -> Link:
    links = links_within(kind.hardware, kind.gpus)
    if kind.one_clique:
        return nvlink_of_group(kind.hardware, links, len(kind.gpus))
    # On a DGX-1 each GPU has a link to one of the other four: rings go over these, and NCCL goes by the GPU at their
    # end where two have none.
    leaving = nvlinks_leaving(kind.hardware, kind.cliques)
    return nvlinks(kind.hardware, leaving) if leaving else pcie(kind.hardware, links)


def fabric_link(nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes) -> Link:
    """What the NICs of the nodes give to each rank."""
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
