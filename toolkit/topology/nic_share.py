"""What the NICs of a node give to each of its ranks when all of them talk to other nodes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.topology.facts import Hardware
from toolkit.topology.links import DISTANCE
from toolkit.topology.nominal_links import gpu_slot
from toolkit.topology.notes import first_named
from toolkit.topology.tiers import Link

_ASSUMED_GBIT_PER_S = 100.0
_LATENCY_S = 10e-6


def nic_share(hardware: Hardware, gpus: Sequence[int | None]) -> Link | None:
    """The least share of the ranks on these GPUs; None where no rate is known.

    A rank talks over the fast NICs that are nearest to its GPU, as NCCL does, and shares each with the ranks that have
    no others. None is a rank of which no GPU is known: it talks over all.
    """
    rates, source = _rates(hardware)
    if not rates:
        return None
    ways = [_nearest(hardware, gpu, rates) for gpu in gpus]

    def bound(nics: frozenset[str]) -> int:
        return sum(way <= nics for way in ways)

    def gbit_per_s(nics: frozenset[str]) -> float:
        return sum(rates[nic] for nic in nics)

    # Sets of nearest NICs are equal, apart, or one in the other: the narrowest is one of them, or all together.
    everywhere = frozenset(nic for way in ways for nic in way)
    narrowest = min(sorted({*ways, everywhere}, key=sorted), key=lambda nics: gbit_per_s(nics) / bound(nics))
    total, ranks = gbit_per_s(narrowest), bound(narrowest)
    names = first_named([nic for nic in rates if nic in narrowest])
    said = f"{names}: {total:g} Gbit/s for {ranks} rank{'' if ranks == 1 else 's'}, by {source}"
    share = Link(_LATENCY_S, total * 1e9 / 8 / ranks, said)
    slot = gpu_slot(hardware)
    if slot is None or slot.bytes_per_s >= share.bytes_per_s:
        return share
    return Link(_LATENCY_S, slot.bytes_per_s, slot.source)


def assumed_share(ranks: int) -> Link:
    """What stands in where nobody knows the NICs."""
    said = f"assumed {_ASSUMED_GBIT_PER_S:g} Gbit/s a node, for {ranks} rank{'' if ranks == 1 else 's'}"
    return Link(_LATENCY_S, _ASSUMED_GBIT_PER_S * 1e9 / 8 / ranks, said)


def _rates(hardware: Hardware) -> tuple[dict[str, float], str]:
    """(Gbit/s of the NICs by their names, in active ports of more than half the fastest one's rate, who says so).

    NICs for storage and management are slower than those that nodes are joined by.
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
    """The NICs nearest to a GPU, of those that have a rate; all, where a link is unknown that may be a nearer one."""
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
