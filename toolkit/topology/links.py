"""What follows from a link matrix: which GPUs share NVLink, and which NIC is nearest to each GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from toolkit.topology.parsers.nvidia_smi_topo import LinkMatrix

# From near to far. SOC is what older drivers call SYS.
DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}


@dataclass(frozen=True)
class NearestNics:
    """The nearest NICs of one GPU: all of them when several are equally near."""

    gpu: str
    level: str
    nics: tuple[str, ...]


def pair_counts(matrix: LinkMatrix) -> dict[str, int]:
    """Count the links over unordered pairs of GPUs; pairs whose link is unknown are not counted."""
    counts: Counter[str] = Counter()
    for i, row in enumerate(matrix.gpu_links):
        for j in range(i):
            if link := row[j] or matrix.gpu_links[j][i]:
                counts[link] += 1
    return dict(counts)


def summary(matrix: LinkMatrix) -> str:
    """The links between GPUs in one line: "all NV12", or "8x NV1, 12x SYS"."""
    if len(matrix.gpus) < 2:
        return "single GPU, no pairs" if matrix.gpus else "no GPU"
    counts = sorted(pair_counts(matrix).items())
    if len(counts) == 1:
        return f"all {counts[0][0]}"
    return ", ".join(f"{count}x {link}" for link, count in counts) or "no link is known"


def nearest_nics(matrix: LinkMatrix) -> tuple[NearestNics, ...]:
    """The nearest NICs of every GPU that has a known link to one, by device name where there is a legend."""
    found = []
    for gpu, row in zip(matrix.gpus, matrix.nic_links, strict=True):
        known = {nic: link for nic, link in enumerate(row) if link in DISTANCE}
        if known:
            level = min(known.values(), key=lambda link: DISTANCE[link])
            nearest = [nic for nic, link in known.items() if DISTANCE[link] == DISTANCE[level]]
            names = tuple(matrix.nic_devices[nic] or matrix.nics[nic] for nic in nearest)
            found.append(NearestNics(gpu, level, names))
    return tuple(found)


def nvlink_cliques(matrix: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Maximal sets of two or more GPU indices in which every pair has NVLink, ordered.

    Bron and Kerbosch, "Algorithm 457: finding all cliques of an undirected graph", CACM 16 (1973).
    """
    neighbours = _nvlink_neighbours(matrix)
    cliques: list[tuple[int, ...]] = []

    def extend(clique: set[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded and len(clique) > 1:
            cliques.append(tuple(sorted(clique)))
        for gpu in sorted(candidates):
            extend(clique | {gpu}, candidates & neighbours[gpu], excluded & neighbours[gpu])
            candidates = candidates - {gpu}
            excluded = excluded | {gpu}

    extend(set(), set(neighbours), set())
    return tuple(sorted(cliques))


def nvlink_components(matrix: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Sets of two or more GPU indices that are joined by NVLink over any number of hops, ordered."""
    neighbours = _nvlink_neighbours(matrix)
    components: list[tuple[int, ...]] = []
    left = set(neighbours)
    while left:
        reached, frontier = set(), {min(left)}
        while frontier:
            reached |= frontier
            frontier = set().union(*(neighbours[gpu] for gpu in frontier)) - reached
        left -= reached
        if len(reached) > 1:
            components.append(tuple(sorted(reached)))
    return tuple(components)


def _nvlink_neighbours(matrix: LinkMatrix) -> dict[int, set[int]]:
    links = matrix.gpu_links
    gpus = range(len(matrix.gpus))
    return {i: {j for j in gpus if i != j and (links[i][j] or links[j][i] or "").startswith("NV")} for i in gpus}
