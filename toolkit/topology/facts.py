"""Facts about nodes, each with its source. An unknown value is None with a reason, never a guess.

`Hardware` contains the facts that nodes of one kind have in common; equal nodes share one object. `NodeFacts` contains
the facts that differ between such nodes: host names, switches, and the unique identifiers of devices.
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

# The evidence for a fact, in this order: two or more sources; driver or kernel; command output; other facts; none.
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

    `source` names the library, folder, command or variable that toolkit read; several are separated by commas. `missing`
    is the reason if `value` is None, else empty. If sources contradict each other, `value` is None, and `claims` lists
    the value from each source.
    """

    value: T | None
    source: str
    confidence: Confidence
    missing: str = ""
    claims: tuple[Claimed, ...] = ()


def unknown(source: str, missing: str) -> Fact[Any]:
    """Return a fact without a value; `missing` is the reason."""
    return Fact(None, source, "unknown", missing)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. `cpus` is a CPU list such as "0-15,64-79", empty for a NUMA node with only memory."""

    number: int
    socket: Fact[int]
    cpus: Fact[str]
    memory_mib: Fact[int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `bus` is its PCI address in the format of /sys; `numa_node` and `cpus` are those nearest to it."""

    index: int
    name: Fact[str]
    bus: Fact[str]
    numa_node: Fact[int]
    cpus: Fact[str]
    memory_bytes: Fact[int]
    mig: Fact[bool]

    @property
    def label(self) -> str:
        """The name of this GPU in links, such as GPU0."""
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
    """One kind of link (NV12, PIX, PXB, PHB, NODE, SYS, or unknown), and the device pairs that it connects."""

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
        """Return the link of each pair of devices, in both directions."""
        links = {pair: link.link for link in self.links for pair in link.pairs}
        return links | {(second, first): link for (first, second), link in links.items()}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts that one node collects about itself.

    `gpu_uuids` and `gpu_fabrics` are in the order of `hardware.gpus`, `nic_guids` in the order of the NICs. GPUs with
    equal fabrics are in one NVLink clique, even on different nodes; "none" means that no NVLink fabric connects the GPU
    to other nodes. `warnings` reports data from the sources that toolkit cannot parse.
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
    """Yield every fact inside a part of a node with a label, such as ("GPU1 numa_node", fact)."""
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
    """Return one line for each fact on which sources disagree, with the claim of each source."""
    return tuple(
        f"{label}: {', '.join(f'{claim.source} says {claim.value}' for claim in fact.claims)}"
        for label, fact in facts_of(node)
        if fact.claims
    )


@dataclass(frozen=True)
class RankPlace:
    """The node and the GPU of a rank. `host` is None if unknown; `node` is the node number from the launcher.

    `gpu` is a UUID, because CUDA numbers depend on the process; None if the rank has no GPU or its UUID is unknown.
    """

    rank: int
    host: str | None
    node: int
    local_rank: int
    gpu: str | None = None


@dataclass(frozen=True)
class Topology:
    """The facts about all nodes, the same on every rank.

    `nodes` and `ranks_by_host` are sorted by the lowest rank on the node; without ranks, `nodes` are sorted by name. The
    ranks of a host are in ascending order. `unplaced_ranks` lists the ranks with an unknown host. `conflicts` reports
    contradictions between nodes and ranks. `gpu_of_rank` contains the GPU UUIDs of the ranks, as far as known.
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
