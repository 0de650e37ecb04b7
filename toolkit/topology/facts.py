"""Facts about nodes, each with its source. What is not known is None and says why; it is never a guess.

What nodes of one kind have in common stands in `Hardware`, which equal nodes share; what tells them apart (names,
switches, the numbers that makers give to single devices) stands in `NodeFacts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from toolkit.topology.readers.topology_address import SwitchPath

T = TypeVar("T")

# How well a fact is known: two or more sources say it; the driver or the kernel says it; a command's output says it;
# it follows from other facts; it is not known.
Confidence = Literal["confirmed", "direct", "printed", "derived", "unknown"]
CONTRADICTED = "sources contradict each other"


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one source says where another says something else."""

    value: str | bool | int | float | None
    source: str


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One thing that is known, or the reason why it is not.

    `source` names the library, folder, command or variable that was asked, several with commas between them. `missing`
    is empty exactly when `value` is not None. `claims` has what each source says where they contradict each other; none
    of them is believed then, and `value` is None.
    """

    value: T | None
    source: str
    confidence: Confidence
    missing: str = ""
    claims: tuple[Claimed, ...] = ()


def unknown(source: str, missing: str) -> Fact[Any]:
    """A fact that nobody knows, and why."""
    return Fact(None, source, "unknown", missing)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node of the processors: `cpus` as a list with ranges, empty for a node of memory alone."""

    number: int
    socket: Fact[int]
    cpus: Fact[str]
    memory_mib: Fact[int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `bus` is its PCI address as /sys writes it, `numa_node` the one next to it, `cpus` those next to it."""

    index: int
    name: Fact[str]
    bus: Fact[str]
    numa_node: Fact[int]
    cpus: Fact[str]
    memory_bytes: Fact[int]
    mig: Fact[bool]

    @property
    def label(self) -> str:
        """How links name it: GPU0."""
        return f"GPU{self.index}"


@dataclass(frozen=True, slots=True)
class NicPort:
    """One port of a NIC. The rate, in Gbit/s, is known only while the port is active."""

    number: int
    state: Fact[str]
    rate_gbit_per_s: Fact[float]
    link_layer: Fact[str]


@dataclass(frozen=True, slots=True)
class Nic:
    """One adapter by its RDMA device's name (mlx5_0); `net_device` are its network interfaces, with commas."""

    name: str
    net_device: Fact[str]
    bus: Fact[str]
    numa_node: Fact[int]
    ports: tuple[NicPort, ...]


@dataclass(frozen=True, slots=True)
class LinkFact:
    """One kind of link (NV12, PIX, PXB, PHB, NODE, SYS), or an unknown one, and the pairs of devices that have it."""

    link: Fact[str]
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What nodes of one kind have in common. `gpu_count` is unknown where sources count differently."""

    sockets: Fact[int]
    cpus: Fact[str]
    numa_nodes: Fact[tuple[NumaNode, ...]]
    gpu_count: Fact[int]
    gpus: tuple[Gpu, ...]
    nics: Fact[tuple[Nic, ...]]
    links: tuple[LinkFact, ...]

    def link_of(self) -> dict[tuple[str, str], Fact[str]]:
        """The link of each pair of devices, both ways round."""
        found = {pair: link.link for link in self.links for pair in link.pairs}
        return found | {(other, one): link for (one, other), link in found.items()}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node says of itself.

    `gpu_uuids` and `gpu_fabrics` follow the order of `hardware.gpus`, `nic_guids` that of the NICs. GPUs with equal
    fabrics are in one NVLink clique, also on different nodes; "none" is a GPU without a fabric that joins nodes.
    `warnings` tell of damage in what the sources said.
    """

    host: Fact[str]
    switches: Fact[SwitchPath]
    hardware: Hardware
    gpu_uuids: tuple[Fact[str], ...] = ()
    gpu_fabrics: tuple[Fact[str], ...] = ()
    nic_guids: tuple[Fact[str], ...] = ()
    warnings: tuple[str, ...] = ()


NO_FABRIC = "none"


def facts_of(part: Any, place: str = "") -> Iterator[tuple[str, Fact[Any]]]:
    """Every fact below a part of a node, with the words that say of what: ("GPU1 numa_node", fact)."""
    if isinstance(part, Fact):
        yield place, part
        yield from facts_of(part.value, place) if isinstance(part.value, tuple) else ()
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from facts_of(one, f"{place} {number}".strip() if isinstance(one, Fact) else "")
    elif isinstance(part, LinkFact):
        yield ", ".join("-".join(pair) for pair in part.pairs), part.link
    elif isinstance(part, (NodeFacts, Hardware, NumaNode, Gpu, Nic, NicPort)):
        for one in fields(part):
            yield from facts_of(getattr(part, one.name), f"{_name(part)} {one.name}".strip())


def _name(part: Any) -> str:
    if isinstance(part, Gpu):
        return part.label
    if isinstance(part, Nic):
        return part.name
    return f"NUMA node {part.number}" if isinstance(part, NumaNode) else ""


def contradictions(node: NodeFacts) -> tuple[str, ...]:
    """What sources say against each other, one line each, with all of them."""
    return tuple(
        f"{place}: {', '.join(f'{claim.source} says {claim.value}' for claim in fact.claims)}"
        for place, fact in facts_of(node)
        if fact.claims
    )


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: `host` is None when unknown, `node` is the launcher's number of the node.

    `gpu` is the UUID of its GPU, whatever number CUDA gives it there; None without one, or when nobody tells.
    """

    rank: int
    host: str | None
    node: int
    local_rank: int
    gpu: str | None = None


@dataclass(frozen=True)
class Topology:
    """The facts of all nodes, the same on every rank.

    `nodes` and `ranks_by_host` are ordered by the lowest rank on the node, ranks ascending; without ranks `nodes` are in
    the order of their names. Ranks whose host is unknown stand in `unplaced_ranks`. `conflicts` tell where nodes and
    ranks contradict each other. `gpu_of_rank` has the UUIDs of the GPUs of ranks, as far as they are known.
    """

    nodes: tuple[NodeFacts, ...]
    ranks_by_host: Mapping[str, tuple[int, ...]]
    unplaced_ranks: tuple[int, ...] = ()
    conflicts: tuple[str, ...] = ()
    gpu_of_rank: Mapping[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(ranks) for ranks in self.ranks_by_host.values()) + len(self.unplaced_ranks)
