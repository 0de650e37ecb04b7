"""Derive NVLink cliques, PCIe switches, sockets and nearest NICs from the link facts of one kind of node."""

from collections.abc import Callable, Iterator, Sequence

from toolkit.topology.facts import Hardware
from toolkit.topology.links.matrix import NearestNics, disjoint_cliques, nearest

__all__ = ["cliques_of", "links_within", "nearest_nics_of"]

Groups = tuple[tuple[int, ...], ...]  # indexes of `Hardware.gpus`

MOST_NVLINKS = 18  # the maximum per GPU, up to NVLink 5


def cliques_of(hardware: Hardware) -> Groups:
    """Return disjoint sets of GPUs in which every pair is known to have NVLink, each the largest of those left."""
    return disjoint_cliques(_neighbours(hardware, lambda link: link.startswith("NV")))


def switches_of(hardware: Hardware) -> Groups:
    """Return disjoint sets of GPUs below the same PCIe switches."""
    return disjoint_cliques(_neighbours(hardware, lambda link: link in ("PIX", "PXB")))


def sockets_of(hardware: Hardware) -> Groups | None:
    """Return the GPUs of each NUMA node; None if the NUMA node of a GPU is unknown."""
    nodes = [gpu.numa_node.value for gpu in hardware.gpus]
    if None in nodes:
        return None
    return tuple(tuple(place for place, node in enumerate(nodes) if node == number) for number in dict.fromkeys(nodes))


def nvlink_count(link: str | None) -> int:
    """Return the number of NVLinks in a link: 12 for NV12, 0 for PIX, 1 if the link states no count."""
    if link is None or not link.startswith("NV"):
        return 0
    return int(link[2:]) if link[2:].isdecimal() else 1


def nvlinks_to(counts: Sequence[int]) -> int:
    """Return the number of NVLinks from one GPU to others, given the counts to each of them.

    With NVSwitches, all links of a GPU lead to every other GPU, so a sum above the maximum counts links repeatedly.
    """
    total = sum(counts)
    return total if total <= MOST_NVLINKS else max(counts)


def nvlinks_leaving(hardware: Hardware, groups: Groups) -> int:
    """Return the minimum number of NVLinks from any GPU to GPUs in other groups."""
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    counts: dict[int, list[int]] = {place: [] for place in range(len(hardware.gpus))}
    for one, other, link in gpu_links(hardware):
        if nvlink_count(link) and (one not in group_of or group_of[one] != group_of.get(other)):
            counts[one].append(nvlink_count(link))
            counts[other].append(nvlink_count(link))
    return min((nvlinks_to(found) for found in counts.values()), default=0)


def gpu_links(hardware: Hardware) -> Iterator[tuple[int, int, str | None]]:
    """Yield (index, index, link) for each pair of GPUs."""
    places = {gpu.label: place for place, gpu in enumerate(hardware.gpus)}
    for link in hardware.links:
        for one, other in link.pairs:
            if one in places and other in places:
                yield places[one], places[other], link.link.value


def unknown_pairs(hardware: Hardware) -> list[tuple[str, str]]:
    """Return the pairs of GPUs with an unknown link, for example because sources contradict each other."""
    labels = [gpu.label for gpu in hardware.gpus]
    return [(labels[one], labels[other]) for one, other, link in gpu_links(hardware) if link is None]


def links_within(hardware: Hardware, group: tuple[int, ...]) -> list[str | None]:
    """Return the link of each pair in a group of GPUs; None if it is unknown."""
    found = hardware.link_of()
    labels = [hardware.gpus[place].label for place in group]
    return [
        found[one, other].value if (one, other) in found else None
        for place, one in enumerate(labels)
        for other in labels[place + 1 :]
    ]


def nearest_nics_of(hardware: Hardware) -> dict[int, NearestNics]:
    """Return the nearest NICs by GPU index, without GPUs with an unknown link to a NIC that may be nearer."""
    gpus = {gpu.label: place for place, gpu in enumerate(hardware.gpus)}
    links: dict[int, dict[str, str | None]] = {}
    for link in hardware.links:
        for one, other in link.pairs:
            if other not in gpus and one in gpus:
                links.setdefault(gpus[one], {})[other] = link.link.value
    found = {place: nearest(hardware.gpus[place].label, to) for place, to in links.items()}
    return {place: near for place, near in found.items() if near is not None}


def _neighbours(hardware: Hardware, wanted: Callable[[str], bool]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {place: set() for place in range(len(hardware.gpus))}
    for one, other, link in gpu_links(hardware):
        if link is not None and wanted(link):
            found[one].add(other)
            found[other].add(one)
    return found
