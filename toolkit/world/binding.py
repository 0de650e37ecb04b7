"""Choose the CPUs to which a rank binds: those of its assigned CPUs that are near its GPU and used by no other rank.

This module makes no system calls. A rank never gets more CPUs than were assigned, and always at least one. If a
smaller set would do harm, it keeps all of them, with a reason. Hyper-threads of a core stay together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import counted

__all__ = ["Binding", "Processors", "RankOfNode", "bind", "unbound"]

Cpus = frozenset[int]


@dataclass(frozen=True)
class Processors:
    """The CPUs of a node, by NUMA node (none for memory-only NUMA nodes) and by core."""

    numa_nodes: Mapping[int, Cpus]
    cores: tuple[Cpus, ...]

    def cores_of(self, cpus: Cpus) -> list[Cpus]:
        """Return the cores of `cpus`, without other CPUs, in NUMA order; a CPU without a known core is its own core."""
        known = [part for core in self.cores if (part := core & cpus)]
        known += [frozenset({cpu}) for cpu in cpus.difference(*known)]
        node_of = {cpu: number for number, near in self.numa_nodes.items() for cpu in near}
        last = max(self.numa_nodes, default=0) + 1
        return sorted(known, key=lambda core: (node_of.get(min(core), last), min(core)))

    def nodes_of(self, cpus: Cpus) -> list[int]:
        """Return the NUMA nodes of `cpus`."""
        return sorted(number for number, near in self.numa_nodes.items() if near & cpus)


@dataclass(frozen=True)
class RankOfNode:
    """A rank of this node: its assigned CPUs, and the NUMA node of its GPU; each is None if unknown."""

    given: Cpus | None
    near: int | None = None


@dataclass(frozen=True)
class Binding:
    """The CPUs to bind to, the number of compute threads for them, and the reason."""

    cpus: Cpus
    threads: int
    reason: str


def bind(local_rank: int, ranks: Sequence[RankOfNode], processors: Processors, *, on_gpu: bool) -> Binding:
    """Choose the CPUs of one rank.

    Args:
        ranks: the ranks of this node, by local rank; the CPUs of `local_rank` must be known.
        on_gpu: whether each rank has a GPU; its NUMA node may be unknown.
    """
    given = ranks[local_rank].given
    assert given  # the kernel does not accept an empty set
    peers = [number for number, rank in enumerate(ranks) if rank.given == given]
    as_given = unbound(local_rank, ranks, processors)
    if any(rank.given is None for rank in ranks):
        peers = []  # the ranks that share these CPUs are unknown
    elif any(rank.given & given for rank in ranks if rank.given and rank.given != given):
        return replace(as_given, reason="the launcher assigned overlapping CPUs to ranks")
    if on_gpu:
        return _next_to_gpu(local_rank, ranks, peers, processors, as_given)
    if len(peers) == 1:
        alone = "the node has no other rank" if len(ranks) == 1 else "no other rank may use these CPUs"
        return replace(as_given, reason=alone)
    if not peers:
        return replace(as_given, reason="the CPUs of the node's other ranks are unknown")
    cores = processors.cores_of(given)
    if len(peers) > len(cores):
        return replace(as_given, reason=f"{len(peers)} ranks share {counted(len(cores), 'core')}")
    nodes = processors.nodes_of(given)
    if len(nodes) < 2:
        # All CPUs are equally near to memory, and without binding, the kernel can avoid busy and slow cores.
        where = "one NUMA node" if nodes else "CPUs whose NUMA node is unknown"
        return replace(as_given, reason=f"{len(peers)} ranks share {where}")
    share = _share(cores, peers.index(local_rank), len(peers))
    return Binding(_together(share), len(share), f"{len(peers)} ranks divide the CPUs by NUMA node")


def unbound(local_rank: int, ranks: Sequence[RankOfNode], processors: Processors) -> Binding:
    """Keep all assigned CPUs, with a number of threads that leaves cores for the other ranks."""
    given = ranks[local_rank].given
    assert given
    sharing = sum(rank.given is None or bool(rank.given & given) for rank in ranks)
    return Binding(given, max(1, len(processors.cores_of(given)) // sharing), "")


def _next_to_gpu(
    local_rank: int, ranks: Sequence[RankOfNode], peers: list[int], processors: Processors, as_given: Binding
) -> Binding:
    near = ranks[local_rank].near
    if near is None:
        return replace(as_given, reason="the NUMA node of its GPU is unknown")
    cores = processors.cores_of(as_given.cpus)
    part = processors.cores_of(as_given.cpus & processors.numa_nodes.get(near, frozenset()))
    said = f"NUMA node {near} is next to its GPU"
    if not part:
        return replace(as_given, reason=f"{said}, but contains none of the rank's CPUs")
    # With less than half of an even part per NUMA node, CPUs near the GPU are not worth the loss of the others.
    if 2 * len(part) * len(processors.nodes_of(as_given.cpus)) < len(cores):
        few = counted(len(part), "core")
        return replace(as_given, reason=f"{said}, but contains only {few} of the {len(cores)} assigned")
    if not peers or any(ranks[number].near is None for number in peers):
        threads = min(len(part), as_given.threads)
        return Binding(_together(part), threads, f"{said}; whether other ranks use it is unknown")
    sharing = [number for number in peers if ranks[number].near == near]
    if len(sharing) > len(part):
        return replace(as_given, reason=f"{said}, and {len(sharing)} ranks share its {counted(len(part), 'core')}")
    share = _share(part, sharing.index(local_rank), len(sharing))
    return Binding(_together(share), len(share), said + (f"; {len(sharing)} ranks divide it" * (len(sharing) > 1)))


def _share(cores: Sequence[Cpus], place: int, places: int) -> Sequence[Cpus]:
    """Return one of `places` slices equal up to one core; they end at borders between equal NUMA nodes if possible."""
    return cores[place * len(cores) // places : (place + 1) * len(cores) // places]


def _together(cores: Sequence[Cpus]) -> Cpus:
    return frozenset().union(*cores)
