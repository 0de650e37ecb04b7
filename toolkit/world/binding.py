"""Choose the CPUs of a rank: of those assigned to it, the ones next to its GPU that no other rank uses.

Pure arithmetic. A rank never gets more CPUs than were assigned, and never none; if a division would do harm, it keeps
all of them, with a reason. Hyper-threads of a core stay together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import counted

__all__ = ["Binding", "Processors", "RankOfNode", "bind", "unbound"]

Cpus = frozenset[int]


@dataclass(frozen=True)
class Processors:
    """The CPUs of a node: those of each NUMA node by its number (none for memory-only nodes), and those of each core."""

    numa_nodes: Mapping[int, Cpus]
    cores: tuple[Cpus, ...]

    def cores_of(self, cpus: Cpus) -> list[Cpus]:
        """Return the cores of `cpus`, restricted to them, by NUMA node; a CPU without a known core is one."""
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
    """A rank of this node: its assigned CPUs, and the NUMA node of its GPU; None if unknown."""

    given: Cpus | None
    near: int | None = None


@dataclass(frozen=True)
class Binding:
    """`cpus` to bind to, the number of threads that use them, and the reason."""

    cpus: Cpus
    threads: int
    reason: str


def bind(local_rank: int, ranks: Sequence[RankOfNode], processors: Processors, *, on_gpu: bool) -> Binding:
    """Choose the CPUs of one rank.

    Args:
        ranks: of this node, by local rank; the CPUs of `local_rank` are known.
        on_gpu: each rank has a GPU, whose NUMA node may be unknown.
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
        alone = "it is the node's only rank" if len(ranks) == 1 else "the launcher assigned them to it alone"
        return replace(as_given, reason=alone)
    if not peers:
        return replace(as_given, reason="the CPUs of the node's other ranks are unknown")
    cores = processors.cores_of(given)
    if len(peers) > len(cores):
        return replace(as_given, reason=f"{len(peers)} ranks share {counted(len(cores), 'core')}")
    nodes = processors.nodes_of(given)
    if len(nodes) < 2:
        # All CPUs are equally near to memory; the kernel schedules around other work and slow cores.
        where = "one NUMA node" if nodes else "CPUs of no known NUMA node"
        return replace(as_given, reason=f"{len(peers)} ranks share {where}")
    share = _share(cores, peers.index(local_rank), len(peers))
    return Binding(_together(share), len(share), f"{len(peers)} ranks divide the CPUs by NUMA node")


def unbound(local_rank: int, ranks: Sequence[RankOfNode], processors: Processors) -> Binding:
    """Keep all assigned CPUs, with as many threads as leave some for the other ranks."""
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
        return replace(as_given, reason=f"{said}, and none of the rank's CPUs is there")
    # Half of an even share: a few CPUs next to the GPU are not worth the loss of all others.
    if 2 * len(part) * len(processors.nodes_of(as_given.cpus)) < len(cores):
        few = counted(len(part), "core")
        return replace(as_given, reason=f"{said}, and only {few} of the {len(cores)} assigned CPUs are there")
    if not peers or any(ranks[number].near is None for number in peers):
        threads = min(len(part), as_given.threads)
        return Binding(_together(part), threads, f"{said}; which other ranks use it is unknown")
    sharing = [number for number in peers if ranks[number].near == near]
    if len(sharing) > len(part):
        return replace(as_given, reason=f"{said}, and {len(sharing)} ranks share its {counted(len(part), 'core')}")
    share = _share(part, sharing.index(local_rank), len(sharing))
    return Binding(_together(share), len(share), said + (f"; {len(sharing)} ranks divide it" * (len(sharing) > 1)))


def _share(cores: Sequence[Cpus], place: int, places: int) -> Sequence[Cpus]:
    """Return one of equal slices, up to a core; slices of equal NUMA nodes end with these, if their numbers allow it."""
    return cores[place * len(cores) // places : (place + 1) * len(cores) // places]


def _together(cores: Sequence[Cpus]) -> Cpus:
    return frozenset().union(*cores)
