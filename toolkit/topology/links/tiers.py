"""Estimate the link that a rank has in each tier (NVLink clique, node, network), on the slowest kind of node."""

from collections.abc import Iterable, Mapping, Sequence

from toolkit.topology.facts import Hardware, NodeFacts
from toolkit.topology.links.matrix import nearest
from toolkit.topology.links.nodes import links_within, nvlinks_leaving
from toolkit.topology.links.nominal import gpu_slot, nvlink_of_group, nvlinks, pcie
from toolkit.topology.names import Notes, first_named
from toolkit.topology.node_kinds import NodeKind, Place
from toolkit.topology.tiers import Link

_ASSUMED_GBIT_PER_S = 100.0
_LATENCY_S = 10e-6


def nic_share(hardware: Hardware, gpus: Sequence[int | None]) -> Link | None:
    """Return the smallest NIC bandwidth per rank among ranks on these GPUs; None if no rate is known.

    As in NCCL, a rank uses the fast NICs nearest to its GPU, and shares them with the ranks that use no others. A rank
    with an unknown GPU (None) uses all NICs.
    """
    rates, source = _rates(hardware)
    if not rates:
        return None
    nics_of_ranks = [_nearest(hardware, gpu, rates) for gpu in gpus]

    def bound(nics: frozenset[str]) -> int:
        return sum(own <= nics for own in nics_of_ranks)

    def gbit_per_s(nics: frozenset[str]) -> float:
        return sum(rates[nic] for nic in nics)

    # Sets of nearest NICs are equal, disjoint or nested, so the bottleneck is one of the sets, or their union.
    everywhere = frozenset(nic for own in nics_of_ranks for nic in own)
    narrowest = min(sorted({*nics_of_ranks, everywhere}, key=sorted), key=lambda nics: gbit_per_s(nics) / bound(nics))
    total, ranks = gbit_per_s(narrowest), bound(narrowest)
    names = first_named([nic for nic in rates if nic in narrowest])
    description = f"{names}: {total:g} Gbit/s for {ranks} rank{'' if ranks == 1 else 's'}, from {source}"
    share = Link(_LATENCY_S, total * 1e9 / 8 / ranks, description)
    slot = gpu_slot(hardware)
    if slot is None or slot.bytes_per_s >= share.bytes_per_s:
        return share
    return Link(_LATENCY_S, slot.bytes_per_s, slot.source)


def assumed_share(ranks: int) -> Link:
    """Return an assumed NIC bandwidth per rank, for nodes with unknown NICs."""
    description = f"assumed {_ASSUMED_GBIT_PER_S:g} Gbit/s per node, for {ranks} rank{'' if ranks == 1 else 's'}"
    return Link(_LATENCY_S, _ASSUMED_GBIT_PER_S * 1e9 / 8 / ranks, description)


def _rates(hardware: Hardware) -> tuple[dict[str, float], str]:
    """Return (Gbit/s of each NIC, the sources of the rates).

    Ports with at most half the fastest rate are omitted, since they are probably for storage or management.
    """
    ports = [(nic.name, port.rate_gbit_per_s) for nic in hardware.nics.value or () for port in nic.ports]
    known = [(name, rate.value, rate.source) for name, rate in ports if rate.value is not None]
    fastest = max((rate for _, rate, _ in known), default=0.0)
    rates: dict[str, float] = {}
    sources: dict[str, None] = {}
    for name, rate, source in known:
        if 2 * rate > fastest:
            rates[name] = rates.get(name, 0.0) + rate
            sources[source] = None
    return rates, ", ".join(sources)


def _nearest(hardware: Hardware, gpu: int | None, rates: Mapping[str, float]) -> frozenset[str]:
    """Return the NICs in `rates` that are nearest to a GPU; all of them if a NIC with an unknown link may be nearer."""
    if gpu is None:
        return frozenset(rates)
    label, links = hardware.gpus[gpu].label, hardware.link_of()
    near = nearest(label, {nic: links[label, nic].value if (label, nic) in links else None for nic in rates})
    return frozenset(near.nics if near else rates)


def slowest(links: Iterable[Link]) -> Link:
    """Return the link with the lowest bandwidth."""
    return min(links, key=lambda link: link.bytes_per_s)


def clique_link(kinds: Sequence[NodeKind], *, between_nodes: bool) -> Link:
    """Return the slowest NVLink in a clique, inside a node or across nodes."""
    links = [
        # Between nodes, NVLink always has switches, so two members suffice to count the links of a GPU.
        nvlink_of_group(kind.hardware, links_within(kind.hardware, group), 2 if between_nodes else len(group))
        for kind in dict.fromkeys(kinds)
        for group in kind.cliques
    ]
    return slowest(links) if links else nvlink_of_group(kinds[0].hardware, [], 2)


def node_link(kinds: Sequence[NodeKind]) -> Link:
    """Return the slowest path between two GPUs of a node that are not in the same finer group."""
    return slowest(_across(kind) for kind in dict.fromkeys(kinds))


def _across(kind: NodeKind) -> Link:
    links = links_within(kind.hardware, kind.gpus)
    if kind.one_clique:
        return nvlink_of_group(kind.hardware, links, len(kind.gpus))
    # On a DGX-1, each GPU has an NVLink to one GPU of the other clique. Rings use these links, and NCCL forwards through
    # another GPU if two GPUs have no link.
    leaving = nvlinks_leaving(kind.hardware, kind.cliques)
    return nvlinks(kind.hardware, leaving) if leaving else pcie(kind.hardware, links)


def fabric_link(nodes: Sequence[NodeFacts], kinds: Sequence[NodeKind], places: Sequence[Place], notes: Notes) -> Link:
    """Return the smallest NIC bandwidth per rank on any node; an assumed value for nodes with unknown rates."""
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
