"""A topology as a tree for people: nodes, their sockets and NUMA nodes, the GPUs and NICs next to them.

Every line says who told it. What is unknown says why. At the end stand what is missing to place ranks by, and what sources
say against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NO_FABRIC, Fact, Gpu, Hardware, Nic, NodeFacts, NumaNode, Topology, contradictions
from toolkit.topology.groups_shown import stretches
from toolkit.topology.node_links import cliques_of, nearest_nics_of
from toolkit.topology.tiers_found import tiers_of_topology

_GIB = 2**30


@dataclass
class Branch:
    """A line of the tree, the name first, and the lines below it."""

    name: str
    text: str = ""
    below: list[Branch] = field(default_factory=list)

    def add(self, name: str, text: str = "") -> Branch:
        """Put a line below; that line."""
        branch = Branch(name, text)
        self.below.append(branch)
        return branch


def tree_of(topology: Topology) -> list[Branch]:
    """A tree for each node, one of what placing ranks lacks where it lacks anything, and one of what contradicts."""
    trees = [_node(node) for node in topology.nodes]
    if missing := _missing_for_ranks(topology):
        counted = "1 fact is" if len(missing) == 1 else f"{len(missing)} facts are"
        trees.append(Branch(f"{counted} unknown that ranks are placed by", below=[Branch(line) for line in missing]))
    several = len(topology.nodes) > 1
    last = Branch("contradictions")
    for node in topology.nodes:
        for line in contradictions(node):
            last.add(f"{node.host.value}: {line}" if several else line)
    for line in topology.conflicts:
        last.add(line)
    return [*trees, last] if last.below else trees


def _missing_for_ranks(topology: Topology) -> list[str]:
    """What a job that places its ranks counts as unknown, and what follows from it."""
    notes: list[str] = []
    try:
        tiers_of_topology(topology, None if topology.size else 1, notes)
    except ToolkitError as error:
        return [*notes, error.message]
    return notes


def _node(node: NodeFacts) -> Branch:
    hardware = node.hardware
    tree = Branch(node.host.value or "a node without a name", f"[{node.host.source}]")
    _say(tree, "switches", node.switches, lambda path: " > ".join((*path.levels, path.node)))
    _say(tree, "processors", hardware.cpus, lambda cpus: f"CPUs {cpus}")
    _say(tree, "sockets", hardware.sockets, str)
    _sockets(tree, node)
    if hardware.gpu_count.value is None or not hardware.gpus:
        _say(tree, "GPUs", hardware.gpu_count, str)
    if hardware.nics.value is None or not hardware.nics.value:
        _say(tree, "NICs", hardware.nics, lambda _: "none with RDMA")
    _links(tree, node)
    return tree


def _say(tree: Branch, name: str, fact: Fact[Any], text: Any) -> Branch:
    return tree.add(f"{name}:", f"{_unknown(fact) if fact.value is None else text(fact.value)}  [{fact.source}]")


def _unknown(fact: Fact[Any]) -> str:
    said = ", ".join(f"{claim.source} says {claim.value}" for claim in fact.claims)
    return f"unknown, {fact.missing}" + (f": {said}" if said else "")


def _sockets(tree: Branch, node: NodeFacts) -> None:
    """NUMA nodes below their sockets, each with the devices next to it; then the devices that nobody can place."""
    hardware = node.hardware
    if hardware.numa_nodes.value is None:
        _say(tree, "NUMA nodes", hardware.numa_nodes, str)
    numa_nodes = hardware.numa_nodes.value or ()
    sockets: dict[int, Branch] = {}
    for numa in numa_nodes:
        above = tree
        if numa.socket.value is not None:
            if numa.socket.value not in sockets:
                sockets[numa.socket.value] = tree.add(f"socket {numa.socket.value}", f"[{numa.socket.source}]")
            above = sockets[numa.socket.value]
        _devices(_numa_node(above, numa), node, numa.number)
    known = {numa.number for numa in numa_nodes}
    devices: tuple[Gpu | Nic, ...] = (*hardware.gpus, *(hardware.nics.value or ()))
    elsewhere = dict.fromkeys(one.numa_node.value for one in devices if one.numa_node.value not in known)
    for number in elsewhere:
        said = "of no known NUMA node" if number is None else f"NUMA node {number}, of which nothing else is known"
        _devices(tree.add("devices" if number is None else "", said), node, number)


def _numa_node(tree: Branch, numa: NumaNode) -> Branch:
    branch = tree.add(f"NUMA node {numa.number}")
    branch.text = _facts(
        branch,
        [
            ("CPUs", numa.cpus, f"CPUs {numa.cpus.value}" if numa.cpus.value else "no CPUs"),
            ("memory", numa.memory_mib, f"{(numa.memory_mib.value or 0) / 1024:.0f} GiB"),
        ],
    )
    return branch


def _facts(tree: Branch, facts: Sequence[tuple[str, Fact[Any], str]]) -> str:
    """Known facts in one line, those of one source together; unknown ones on lines below."""
    said: dict[str, list[str]] = {}
    for name, fact, text in facts:
        if fact.value is None:
            tree.add(f"{name}:", f"{_unknown(fact)}  [{fact.source}]")
        else:
            said.setdefault(fact.source, []).append(text)
    return "  ".join(f"{', '.join(texts)}  [{source}]" for source, texts in said.items())


def _devices(tree: Branch, node: NodeFacts, number: int | None) -> None:
    hardware = node.hardware
    for place, gpu in enumerate(hardware.gpus):
        if gpu.numa_node.value == number:
            _gpu(tree, node, place, gpu)
    for place, nic in enumerate(hardware.nics.value or ()):
        if nic.numa_node.value == number:
            _nic(tree, nic, node.nic_guids[place] if place < len(node.nic_guids) else None)


def _gpu(tree: Branch, node: NodeFacts, place: int, gpu: Gpu) -> None:
    branch = tree.add(gpu.label)
    fabric = node.gpu_fabrics[place]
    branch.text = _facts(
        branch,
        [
            ("name", gpu.name, gpu.name.value or ""),
            ("memory", gpu.memory_bytes, f"{(gpu.memory_bytes.value or 0) / _GIB:.0f} GiB"),
            ("MIG", gpu.mig, "MIG on" if gpu.mig.value else "MIG off"),
            ("PCI", gpu.bus, gpu.bus.value or ""),
            ("UUID", node.gpu_uuids[place], node.gpu_uuids[place].value or ""),
            ("fabric", fabric, "no fabric" if fabric.value == NO_FABRIC else f"fabric {fabric.value}"),
            ("near CPUs", gpu.cpus, f"near CPUs {gpu.cpus.value}"),
            ("NUMA node", gpu.numa_node, f"NUMA node {gpu.numa_node.value}"),
        ],
    )
    _nearest(branch, node.hardware, place)


def _nearest(tree: Branch, hardware: Hardware, place: int) -> None:
    found = nearest_nics_of(hardware).get(place)
    links = hardware.link_of()
    label = hardware.gpus[place].label
    if found:
        source = links[label, found.nics[0]].source
        tree.add("nearest NIC:", f"{', '.join(found.nics)} ({found.level})  [{source}]")
        return
    for (one, other), link in links.items():
        if one == label and not other.startswith("GPU") and link.value is None:
            tree.add("nearest NIC:", f"unknown, the link to {other}: {_unknown(link)}  [{link.source}]")
            return


def _nic(tree: Branch, nic: Nic, guid: Fact[str] | None) -> None:
    branch = tree.add(nic.name)
    facts: list[tuple[str, Fact[Any], str]] = [
        ("network device", nic.net_device, nic.net_device.value or ""),
        ("PCI", nic.bus, nic.bus.value or ""),
        ("NUMA node", nic.numa_node, f"NUMA node {nic.numa_node.value}"),
    ]
    if guid:
        facts.append(("GUID", guid, f"GUID {guid.value}"))
    branch.text = _facts(branch, facts)
    for port in nic.ports:
        below = branch.add(f"port {port.number}")
        below.text = _facts(
            below,
            [
                ("state", port.state, port.state.value or ""),
                ("rate", port.rate_gbit_per_s, f"{port.rate_gbit_per_s.value or 0:g} Gbit/s"),
                ("link layer", port.link_layer, port.link_layer.value or ""),
            ],
        )


def _links(tree: Branch, node: NodeFacts) -> None:
    """How many pairs of GPUs have each link, and the cliques that follow."""
    hardware = node.hardware
    labels = {gpu.label for gpu in hardware.gpus}
    if len(labels) < 2:
        return
    links = tree.add("links of GPUs")
    for link in hardware.links:
        pairs = [pair for pair in link.pairs if labels.issuperset(pair)]
        if pairs:
            value = _unknown(link.link) if link.link.value is None else link.link.value
            links.add(f"{value}:", f"{_pairs(pairs, len(labels))}  [{link.link.source}]")
    found = [
        f"GPU {','.join(stretches([hardware.gpus[place].index for place in one]))}" for one in cliques_of(hardware)
    ]
    tree.add("NVLink cliques:", "; ".join(found) or "none")


def _pairs(pairs: Iterable[tuple[str, str]], gpus: int) -> str:
    said = [f"{one}-{other}" for one, other in pairs]
    if len(said) == gpus * (gpus - 1) // 2:
        return f"all {len(said)} pairs" if len(said) > 1 else said[0]
    return ", ".join(said) if len(said) <= 8 else f"{len(said)} pairs"
