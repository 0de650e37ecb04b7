"""Derives NVLink cliques, PCIe switches, sockets and nearest NICs from the link facts of one kind of node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.topology.facts import Hardware
from toolkit.topology.links.matrix import DISTANCE, NearestNics, disjoint_cliques

Groups = tuple[tuple[int, ...], ...]  # places in `Hardware.gpus`

MOST_NVLINKS = 18  # of one GPU, up to NVLink 5


def cliques_of(hardware: Hardware) -> Groups:
    """Disjoint sets of GPUs in which every pair has a known NVLink, greedily the largest."""
    return disjoint_cliques(_neighbours(hardware, lambda link: link.startswith("NV")))


def switches_of(hardware: Hardware) -> Groups:
    """Disjoint sets of GPUs behind the same PCIe switches."""
    return disjoint_cliques(_neighbours(hardware, lambda link: link in ("PIX", "PXB")))


def sockets_of(hardware: Hardware) -> Groups | None:
    """GPUs by their NUMA node; None if the NUMA node of one is unknown."""
    nodes = [gpu.numa_node.value for gpu in hardware.gpus]
    if None in nodes:
        return None
    return tuple(tuple(place for place, node in enumerate(nodes) if node == number) for number in dict.fromkeys(nodes))


def nvlink_count(link: str | None) -> int:
    """The number of NVLinks in a link: 12 in NV12, 0 in PIX, 1 if the link has no count."""
    if link is None or not link.startswith("NV"):
        return 0
    return int(link[2:]) if link[2:].isdecimal() else 1


def nvlinks_to(counts: Sequence[int]) -> int:
    """The number of NVLinks of one GPU to others, given the counts to each.

    A sum above the maximum counts links several times: with NVSwitches, all of them lead to each other GPU.
    """
    total = sum(counts)
    return total if total <= MOST_NVLINKS else max(counts)


def nvlinks_leaving(hardware: Hardware, groups: Groups) -> int:
    """The minimum number of NVLinks from a GPU to GPUs of other groups."""
    places = {gpu.label: place for place, gpu in enumerate(hardware.gpus)}
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    counts: dict[int, list[int]] = {place: [] for place in places.values()}
    for link in hardware.links:
        for pair in link.pairs if nvlink_count(link.link.value) else ():
            one, other = (places.get(label) for label in pair)
            if one is not None and other is not None and (one not in group_of or group_of[one] != group_of.get(other)):
                counts[one].append(nvlink_count(link.link.value))
                counts[other].append(nvlink_count(link.link.value))
    return min((nvlinks_to(found) for found in counts.values()), default=0)


def unknown_pairs(hardware: Hardware) -> list[tuple[str, str]]:
    """Pairs of GPUs with an unknown link, or with sources that contradict each other."""
    labels = {gpu.label for gpu in hardware.gpus}
    return [
        pair for link in hardware.links if link.link.value is None for pair in link.pairs if labels.issuperset(pair)
    ]


def links_within(hardware: Hardware, group: tuple[int, ...]) -> list[str | None]:
    """The link of each pair in a group of GPUs; None if unknown."""
    found = hardware.link_of()
    labels = [hardware.gpus[place].label for place in group]
    return [
        found[one, other].value if (one, other) in found else None
        for place, one in enumerate(labels)
        for other in labels[place + 1 :]
    ]


def nearest_nics_of(hardware: Hardware) -> dict[int, NearestNics]:
    """The nearest NICs by the GPU's place, without GPUs with an unknown link that may be nearer."""
    gpus = {gpu.label: place for place, gpu in enumerate(hardware.gpus)}
    links: dict[int, dict[str, str | None]] = {}
    for link in hardware.links:
        for one, other in link.pairs:
            if other not in gpus and one in gpus:
                links.setdefault(gpus[one], {})[other] = link.link.value
    found = {}
    for place, to in links.items():
        known = {nic: link for nic, link in to.items() if link in DISTANCE}
        level = min((link for link in known.values() if link), key=lambda link: DISTANCE[link], default="")
        if level and (len(known) == len(to) or not DISTANCE[level]):
            nearest = tuple(nic for nic, link in known.items() if link and DISTANCE[link] == DISTANCE[level])
            found[place] = NearestNics(hardware.gpus[place].label, level, nearest)
    return found


def _neighbours(hardware: Hardware, wanted: Callable[[str], bool]) -> dict[int, set[int]]:
    places = {gpu.label: place for place, gpu in enumerate(hardware.gpus)}
    found: dict[int, set[int]] = {place: set() for place in places.values()}
    for link in hardware.links:
        if link.link.value is not None and wanted(link.link.value):
            for one, other in link.pairs:
                if one in places and other in places:
                    found[places[one]].add(places[other])
                    found[places[other]].add(places[one])
    return found
