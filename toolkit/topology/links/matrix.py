"""Derive NVLink cliques and the nearest NICs of each GPU from the link matrix of `nvidia-smi topo -m`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.topology.readers.nvidia_smi_topo import LinkMatrix, parse_nvidia_smi_topo

__all__ = ["NearestNics"]

_UNKNOWN = "null if the link of a pair is unknown"
KEYS = {
    "gpu_count": "number of GPUs",
    "nic_count": "number of NICs; nvidia-smi does not list Slingshot and EFA",
    "nic_columns": "the NICs, by their names in the header",
    "nic_legend": "the device of each NIC in the NIC legend",
    "gpu_pair_link_counts": f"number of GPU pairs with each link (NV12, PIX, ...); {_UNKNOWN}",
    "gpu_link_summary": f'the same as a string: "all NV12", "8x NV1, 12x SYS"; {_UNKNOWN}',
    "one_nvlink_clique": f"whether every pair has NVLink; {_UNKNOWN}",
    "nvlink_maximal_cliques": f"maximal sets of GPU indices in which every pair has NVLink; {_UNKNOWN}",
    "nvlink_components": f"sets of GPU indices that NVLink connects over any number of hops; {_UNKNOWN}",
    "gpu_cpu_affinity": "CPUs near each GPU, as printed, within the job's cpuset",
    "gpu_numa_affinity": "NUMA nodes near each GPU, as printed; null if the driver prints none",
    "gpu_numa_id": "the NUMA node of each GPU's own memory, as printed; null if the driver prints none",
    "closest_nics": "for each GPU the nearest NICs and their distance (PIX < PXB < PHB < NODE < SYS), several if equally "
    "near; null for a GPU with an unknown link to a NIC; empty without NICs",
}
# From near to far. Older drivers print SOC for SYS.
DISTANCE = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}


@dataclass(frozen=True)
class NearestNics:
    """The nearest NICs of one GPU; several if they are equally near."""

    gpu: str
    level: str
    nics: tuple[str, ...]


def pair_counts(matrix: LinkMatrix) -> dict[str, int]:
    """Return the number of GPU pairs for each kind of link, without pairs whose link is unknown."""
    counts: Counter[str] = Counter()
    for i, row in enumerate(matrix.gpu_links):
        counts.update(link for link in row[:i] if link)
    return dict(counts)


def summary(matrix: LinkMatrix) -> str:
    """Return the links between GPUs in one line, such as "all NV12" or "8x NV1, 12x SYS"."""
    if len(matrix.gpus) < 2:
        return "single GPU, no pairs" if matrix.gpus else "no GPU"
    counts = sorted(pair_counts(matrix).items())
    if len(counts) == 1:
        return f"all {counts[0][0]}"
    return ", ".join(f"{count}x {link}" for link, count in counts) or "no link is known"


def nearest(gpu: str, links: Mapping[str, str | None], *, sure: bool = True) -> NearestNics | None:
    """Return the nearest NICs by link; None if unknown. If `sure`, also None if an unknown link may be nearer."""
    known = {nic: link for nic, link in links.items() if link is not None and link in DISTANCE}
    if not known:
        return None
    level = min(known.values(), key=lambda link: DISTANCE[link])
    if sure and DISTANCE[level] and len(known) < len(links):
        return None
    return NearestNics(gpu, level, tuple(nic for nic, link in known.items() if DISTANCE[link] == DISTANCE[level]))


def nearest_nics(matrix: LinkMatrix) -> tuple[NearestNics, ...]:
    """Return the nearest NICs of every GPU with a known link to a NIC, by device name if the matrix has a legend."""
    names = [device or nic for nic, device in zip(matrix.nics, matrix.nic_devices, strict=True)]
    rows = zip(matrix.gpus, matrix.nic_links, strict=True)
    found = (nearest(gpu, dict(zip(names, row, strict=True)), sure=False) for gpu, row in rows)
    return tuple(one for one in found if one is not None)


def nvlink_cliques(matrix: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Return the maximal sets of two or more GPU indices in which every pair has NVLink, sorted."""
    return maximal_cliques(_nvlink_neighbours(matrix))


def maximal_cliques(neighbours: Mapping[int, set[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the maximal sets of two or more members in which all are neighbors of each other, sorted.

    Bron and Kerbosch, "Algorithm 457: finding all cliques of an undirected graph", CACM 16 (1973), with the pivot of
    Tomita, Tanaka and Takahashi (2006): without it the search visits every subset of GPUs that are all connected.
    """
    cliques: list[tuple[int, ...]] = []

    def extend(clique: set[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded and len(clique) > 1:
            cliques.append(tuple(sorted(clique)))
        # Every maximal clique contains the pivot or a GPU that is not its neighbor, so the search starts from these.
        pivot = max(candidates | excluded, key=lambda gpu: len(candidates & neighbours[gpu]), default=None)
        for gpu in sorted(candidates if pivot is None else candidates - neighbours[pivot]):
            extend(clique | {gpu}, candidates & neighbours[gpu], excluded & neighbours[gpu])
            candidates = candidates - {gpu}
            excluded = excluded | {gpu}

    extend(set(), set(neighbours), set())
    return tuple(sorted(cliques))


def disjoint_cliques(neighbours: Mapping[int, set[int]]) -> tuple[tuple[int, ...], ...]:
    """Return disjoint cliques of two or more members, sorted; each is the largest among the remaining members."""
    left = {one: set(others) for one, others in neighbours.items()}
    taken: list[tuple[int, ...]] = []
    while found := maximal_cliques(left):
        largest = max(found, key=len)
        taken.append(largest)
        left = {one: others - set(largest) for one, others in left.items() if one not in largest}
    return tuple(sorted(taken))


def nvlink_components(matrix: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """Return the sets of two or more GPU indices that NVLink connects over any number of hops, sorted."""
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
    rows = enumerate(matrix.gpu_links)
    return {gpu: {other for other, link in enumerate(row) if (link or "").startswith("NV")} for gpu, row in rows}


def answer_nvidia_smi_topo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, warnings that name the damaged lines) for the output of `nvidia-smi topo -m`.

    Raises:
        CheckFailedError: `text` contains no matrix.
    """
    matrix, warnings = parse_nvidia_smi_topo(text)
    known = all(None not in row for row in matrix.gpu_links)
    cliques, components = nvlink_cliques(matrix), nvlink_components(matrix)
    near = {found.gpu: {"level": found.level, "nics": list(found.nics)} for found in nearest_nics(matrix)}
    of_links = {
        "gpu_pair_link_counts": pair_counts(matrix),
        "gpu_link_summary": summary(matrix),
        "one_nvlink_clique": cliques == (tuple(range(len(matrix.gpus))),),
        "nvlink_maximal_cliques": [list(clique) for clique in cliques],
        "nvlink_components": [list(component) for component in components],
    }
    return {
        "gpu_count": len(matrix.gpus),
        "nic_count": len(matrix.nics),
        "nic_columns": list(matrix.nics),
        "nic_legend": {nic: device for nic, device in zip(matrix.nics, matrix.nic_devices, strict=True) if device},
        **{key: value if known else None for key, value in of_links.items()},
        "gpu_cpu_affinity": dict(zip(matrix.gpus, matrix.cpu_affinity, strict=True)),
        "gpu_numa_affinity": dict(zip(matrix.gpus, matrix.numa_affinity, strict=True)),
        "gpu_numa_id": dict(zip(matrix.gpus, matrix.gpu_numa_id, strict=True)),
        "closest_nics": {
            gpu: near[gpu] if all(link in DISTANCE for link in row) else None
            for gpu, row in zip(matrix.gpus, matrix.nic_links, strict=True)
            if row
        },
    }, warnings
