"""Facts about nodes, each with its source. An unknown value is None with a reason; it is never a guess.

`Hardware` contains what nodes of one kind have in common, and equal nodes share it. `NodeFacts` contains what differs
between such nodes: names, switches, and the identifiers that manufacturers give to single devices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from toolkit.topology.readers.topology_address import SwitchPath

__all__ = [
    "CONTRADICTED", "NO_FABRIC", "Claimed", "Confidence", "Fact", "Gpu", "Hardware", "LinkFact", "Nic", "NicPort",
    "NodeFacts", "NumaNode", "RankPlace", "Topology", "contradictions", "facts_of", "unknown",
]  # fmt: skip

T = TypeVar("T")

# The evidence for a fact: two or more sources; the driver or the kernel; the output of a command; other facts; none.
Confidence = Literal["confirmed", "direct", "printed", "derived", "unknown"]
CONTRADICTED = "sources contradict each other"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The value that one source reports when another source reports a different one."""

    value: str | bool | int | float | None
    source: str


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One value with its source, or the reason why it is unknown.

    `source` names the library, folder, command or variable that toolkit read, several separated by commas. `missing`
    is empty exactly when `value` is not None. If sources contradict each other, `claims` has the value of each one, and
    `value` is None.
    """

    value: T | None
    source: str
    confidence: Confidence
    missing: str = ""
    claims: tuple[Claimed, ...] = ()


def unknown(source: str, missing: str) -> Fact[Any]:
    """A fact without a value; `missing` is the reason."""
    return Fact(None, source, "unknown", missing)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: `cpus` is a list with ranges, empty for a node that has only memory."""

    number: int
    socket: Fact[int]
    cpus: Fact[str]
    memory_mib: Fact[int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `bus` is its PCI address in the format of /sys; `numa_node` and `cpus` are the nearest ones."""

    index: int
    name: Fact[str]
    bus: Fact[str]
    numa_node: Fact[int]
    cpus: Fact[str]
    memory_bytes: Fact[int]
    mig: Fact[bool]

    @property
    def label(self) -> str:
        """The name of this GPU in links: GPU0."""
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
    """One adapter, named after its RDMA device (mlx5_0); `net_device` lists its network interfaces with commas."""

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
    """The facts that nodes of one kind have in common. `gpu_count` is unknown if sources report different numbers."""

    sockets: Fact[int]
    cpus: Fact[str]
    numa_nodes: Fact[tuple[NumaNode, ...]]
    gpu_count: Fact[int]
    gpus: tuple[Gpu, ...]
    nics: Fact[tuple[Nic, ...]]
    links: tuple[LinkFact, ...]

    def link_of(self) -> dict[tuple[str, str], Fact[str]]:
        """The link of each pair of devices, in both directions."""
        links = {pair: link.link for link in self.links for pair in link.pairs}
        return links | {(second, first): link for (first, second), link in links.items()}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts that one node collects about itself.

    `gpu_uuids` and `gpu_fabrics` follow the order of `hardware.gpus`, `nic_guids` that of the NICs. GPUs with equal
    fabrics are in one NVLink clique, also on different nodes; "none" is a GPU without a fabric that joins nodes.
    `warnings` report damage in the data of the sources.
    """

    host: Fact[str]
    switches: Fact[SwitchPath]
    hardware: Hardware
    gpu_uuids: tuple[Fact[str], ...] = ()
    gpu_fabrics: tuple[Fact[str], ...] = ()
    nic_guids: tuple[Fact[str], ...] = ()
    warnings: tuple[str, ...] = ()


NO_FABRIC = "none"


def facts_of(part: Any, label: str = "") -> Iterator[tuple[str, Fact[Any]]]:
    """Every fact below a part of a node, with a label of its subject: ("GPU1 numa_node", fact)."""
    if isinstance(part, Fact):
        yield label, part
        yield from facts_of(part.value, label) if isinstance(part.value, tuple) else ()
    elif isinstance(part, tuple):
        for number, item in enumerate(part):
            yield from facts_of(item, f"{label} {number}".strip() if isinstance(item, Fact) else "")
    elif isinstance(part, LinkFact):
        yield ", ".join("-".join(pair) for pair in part.pairs), part.link
    elif isinstance(part, (NodeFacts, Hardware, NumaNode, Gpu, Nic, NicPort)):
        for part_field in fields(part):
            yield from facts_of(getattr(part, part_field.name), f"{_name(part)} {part_field.name}".strip())


def _name(part: Any) -> str:
    if isinstance(part, Gpu):
        return part.label
    if isinstance(part, Nic):
        return part.name
    return f"NUMA node {part.number}" if isinstance(part, NumaNode) else ""


def contradictions(node: NodeFacts) -> tuple[str, ...]:
    """One line for each fact on which sources disagree, with the claim of each source."""
    return tuple(
        f"{label}: {', '.join(f'{claim.source} says {claim.value}' for claim in fact.claims)}"
        for label, fact in facts_of(node)
        if fact.claims
    )


@dataclass(frozen=True)
class RankPlace:
    """The node and the GPU of a rank: `host` is None if unknown, `node` is the launcher's number of the node.

    `gpu` is the UUID of its GPU, independent of CUDA's numbering; None if the rank has no GPU or the UUID is unknown.
    """

    rank: int
    host: str | None
    node: int
    local_rank: int
    gpu: str | None = None


@dataclass(frozen=True)
class Topology:
    """The facts of all nodes, the same on every rank.

    `nodes` and `ranks_by_host` are ordered by the lowest rank on the node, ranks ascending; without ranks, `nodes` are
    ordered by name. `unplaced_ranks` lists the ranks whose host is unknown. `conflicts` reports contradictions between
    nodes and ranks. `gpu_of_rank` has the UUID of each rank's GPU if it is known.
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
