"""The share of a node's NICs for each of its ranks while all of them communicate with other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.topology.facts import Hardware
from toolkit.topology.links.matrix import DISTANCE
from toolkit.topology.links.nominal import gpu_slot
from toolkit.topology.names import first_named
from toolkit.topology.tiers import Link

_ASSUMED_GBIT_PER_S = 100.0
_LATENCY_S = 10e-6


def nic_share(hardware: Hardware, gpus: Sequence[int | None]) -> Link | None:
    """The smallest share of the ranks on these GPUs; None if no rate is known.

    As in NCCL, a rank uses the fast NICs nearest to its GPU, and shares them with the ranks that use no others. A GPU
    of None is unknown: such a rank uses all NICs.
    """
    rates, source = _rates(hardware)
    if not rates:
        return None
    nics_of_ranks = [_nearest(hardware, gpu, rates) for gpu in gpus]

    def bound(nics: frozenset[str]) -> int:
        return sum(own <= nics for own in nics_of_ranks)

    def gbit_per_s(nics: frozenset[str]) -> float:
        return sum(rates[nic] for nic in nics)

    # Sets of nearest NICs are equal, disjoint or nested: the narrowest is one of them, or their union.
    everywhere = frozenset(nic for own in nics_of_ranks for nic in own)
    narrowest = min(sorted({*nics_of_ranks, everywhere}, key=sorted), key=lambda nics: gbit_per_s(nics) / bound(nics))
    total, ranks = gbit_per_s(narrowest), bound(narrowest)
    names = first_named([nic for nic in rates if nic in narrowest])
    description = f"{names}: {total:g} Gbit/s for {ranks} rank{'' if ranks == 1 else 's'}, by {source}"
    share = Link(_LATENCY_S, total * 1e9 / 8 / ranks, description)
    slot = gpu_slot(hardware)
    if slot is None or slot.bytes_per_s >= share.bytes_per_s:
        return share
    return Link(_LATENCY_S, slot.bytes_per_s, slot.source)


def assumed_share(ranks: int) -> Link:
    """An assumed share, if the NICs are unknown."""
    description = f"assumed {_ASSUMED_GBIT_PER_S:g} Gbit/s a node, for {ranks} rank{'' if ranks == 1 else 's'}"
    return Link(_LATENCY_S, _ASSUMED_GBIT_PER_S * 1e9 / 8 / ranks, description)


def _rates(hardware: Hardware) -> tuple[dict[str, float], str]:
    """(Gbit/s of each NIC in ports of more than half the fastest rate, the sources).

    NICs for storage and management are slower than those between nodes.
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
    """The NICs with a rate that are nearest to a GPU; all, if an unknown link may be nearer."""
    if gpu is None:
        return frozenset(rates)
    label, links = hardware.gpus[gpu].label, hardware.link_of()
    known = {nic: links[label, nic].value for nic in rates if (label, nic) in links}
    distances = {nic: DISTANCE[link] for nic, link in known.items() if link in DISTANCE}
    if not distances:
        return frozenset(rates)
    least = min(distances.values())
    if least and len(distances) < len(rates):
        return frozenset(rates)
    return frozenset(nic for nic, distance in distances.items() if distance == least)
