"""Show a topology as a tree of nodes, their sockets and NUMA nodes, and the devices near them.

Every line names its source. After the nodes, the tree lists unknown facts that placement needs, and contradictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import plain
from toolkit.topology.facts import NO_FABRIC, Fact, Gpu, Hardware, Nic, NodeFacts, Topology, contradictions
from toolkit.topology.links.nodes import cliques_of, nearest_nics_of
from toolkit.topology.names import short_ranges
from toolkit.topology.tiers_found import tiers_of_topology

__all__ = ["tree_of"]

_GIB = 2**30
# The name of a fact, the fact, and a function that formats its value.
_Item = tuple[str, Fact[Any], Callable[[Any], str]]


class Branch(Tree):
    """A line of the tree with the lines below it."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__("")
        self.name = name
        self.set_text(text)

    def set_text(self, text: str) -> None:
        """Set the text after the name on this line."""
        style = "not bold yellow" if text.startswith("unknown") else "not bold"
        self.label = Text(plain(self.name), "bold").append(f" {plain(text)}" if text else "", style)

    def below(self, name: str, text: str = "") -> Branch:
        """Add a line below, and return it."""
        branch = Branch(name, text)
        self.children.append(branch)
        return branch

    def add_fact(self, name: str, fact: Fact[Any], text: Callable[[Any], str] = str) -> Branch:
        """Add a line with the value of a fact, or the reason why it is unknown, and its source."""
        value = _unknown(fact) if fact.value is None else text(fact.value)
        return self.below(f"{name}:", f"{value}  [{fact.source}]")

    def set_facts(self, items: Sequence[_Item]) -> None:
        """Show the known facts on this line, grouped by source; add a line below it for each unknown fact."""
        by_source: dict[str, list[str]] = {}
        for name, fact, text in items:
            if fact.value is None:
                self.add_fact(name, fact)
            else:
                by_source.setdefault(fact.source, []).append(text(fact.value))
        self.set_text("  ".join(f"{', '.join(texts)}  [{source}]" for source, texts in by_source.items()))


def tree_of(topology: Topology) -> list[Branch]:
    """Return a tree per node, and if needed, one with unknown facts that placement needs, and one with contradictions."""
    trees = [_node(node) for node in topology.nodes]
    if missing := _missing_for_ranks(topology):
        count = "1 unknown fact" if len(missing) == 1 else f"{len(missing)} unknown facts"
        trees.append(Branch(f"{count} that toolkit needs to place ranks"))
        for line in missing:
            trees[-1].below(line)
    last = Branch("contradictions")
    for node in topology.nodes:
        for line in contradictions(node):
            last.below(f"{node.host.value}: {line}" if len(topology.nodes) > 1 else line)
    for line in topology.conflicts:
        last.below(line)
    return [*trees, last] if last.children else trees


def _missing_for_ranks(topology: Topology) -> list[str]:
    """Return the unknown facts that affect the placement of ranks, each with its effect."""
    notes: list[str] = []
    try:
        tiers_of_topology(topology, None if topology.size else 1, notes)
    except ToolkitError as error:
        return [*notes, error.message]
    return notes


def _node(node: NodeFacts) -> Branch:
    hardware = node.hardware
    tree = Branch(node.host.value or "a node without a name", f"[{node.host.source}]")
    tree.add_fact("switches", node.switches, lambda path: " > ".join((*path.levels, path.node)))
    tree.add_fact("processors", hardware.cpus, lambda cpus: f"CPUs {cpus}")
    tree.add_fact("sockets", hardware.sockets)
    _sockets(tree, node)
    if hardware.gpu_count.value is None or not hardware.gpus:
        tree.add_fact("GPUs", hardware.gpu_count)
    if not hardware.nics.value:
        tree.add_fact("NICs", hardware.nics, lambda _: "none with RDMA")
    _links(tree, hardware)
    return tree


def _sockets(tree: Branch, node: NodeFacts) -> None:
    """Add the NUMA nodes with their devices below their sockets, and then the devices on unknown NUMA nodes."""
    hardware = node.hardware
    if hardware.numa_nodes.value is None:
        tree.add_fact("NUMA nodes", hardware.numa_nodes)
    sockets: dict[int, Branch] = {}
    for numa in hardware.numa_nodes.value or ():
        above = tree
        if (socket := numa.socket.value) is not None:
            if socket not in sockets:
                sockets[socket] = tree.below(f"socket {socket}", f"[{numa.socket.source}]")
            above = sockets[socket]
        branch = above.below(f"NUMA node {numa.number}")
        branch.set_facts([
            ("CPUs", numa.cpus, lambda cpus: f"CPUs {cpus}" if cpus else "no CPUs"),
            ("memory", numa.memory_mib, lambda mib: f"{mib / 1024:.0f} GiB"),
        ])  # fmt: skip
        _devices(branch, node, numa.number)
    known = {numa.number for numa in hardware.numa_nodes.value or ()}
    devices: tuple[Gpu | Nic, ...] = (*hardware.gpus, *(hardware.nics.value or ()))
    for number in dict.fromkeys(one.numa_node.value for one in devices if one.numa_node.value not in known):
        branch = (
            tree.below("devices", "on an unknown NUMA node") if number is None else tree.below(f"NUMA node {number}")
        )
        _devices(branch, node, number)


def _devices(tree: Branch, node: NodeFacts, number: int | None) -> None:
    for place, gpu in enumerate(node.hardware.gpus):
        if gpu.numa_node.value == number:
            _gpu(tree.below(gpu.label), node, place, gpu)
    for place, nic in enumerate(node.hardware.nics.value or ()):
        if nic.numa_node.value == number:
            _nic(tree.below(nic.name), nic, node.nic_guids[place : place + 1])


def _gpu(branch: Branch, node: NodeFacts, place: int, gpu: Gpu) -> None:
    branch.set_facts([
        ("name", gpu.name, str),
        ("memory", gpu.memory_bytes, lambda size: f"{size / _GIB:.0f} GiB"),
        ("MIG", gpu.mig, lambda is_on: "MIG on" if is_on else "MIG off"),
        ("PCI", gpu.bus, str),
        ("UUID", node.gpu_uuids[place], str),
        ("fabric", node.gpu_fabrics[place], lambda label: "no fabric" if label == NO_FABRIC else f"fabric {label}"),
        ("near CPUs", gpu.cpus, lambda cpus: f"near CPUs {cpus}"),
        ("NUMA node", gpu.numa_node, lambda number: f"NUMA node {number}"),
    ])  # fmt: skip
    _nearest_nic(branch, node.hardware, place)


def _nearest_nic(branch: Branch, hardware: Hardware, place: int) -> None:
    links, label = hardware.link_of(), hardware.gpus[place].label
    if nearest := nearest_nics_of(hardware).get(place):
        source = links[label, nearest.nics[0]].source
        branch.below("nearest NIC:", f"{', '.join(nearest.nics)} ({nearest.level})  [{source}]")
        return
    for (one, other), link in links.items():
        if one == label and not other.startswith("GPU") and link.value is None:
            branch.below("nearest NIC:", f"unknown, the link to {other}: {_unknown(link)}  [{link.source}]")
            return


def _nic(branch: Branch, nic: Nic, guids: Sequence[Fact[str]]) -> None:
    branch.set_facts([
        ("network device", nic.net_device, str),
        ("PCI", nic.bus, str),
        ("NUMA node", nic.numa_node, lambda number: f"NUMA node {number}"),
        *(("GUID", guid, lambda value: f"GUID {value}") for guid in guids),
    ])  # fmt: skip
    for port in nic.ports:
        branch.below(f"port {port.number}").set_facts([
            ("state", port.state, str),
            ("rate", port.rate_gbit_per_s, lambda rate: f"{rate:g} Gbit/s"),
            ("link layer", port.link_layer, str),
        ])  # fmt: skip


def _links(tree: Branch, hardware: Hardware) -> None:
    """Add the pairs of GPUs with each link, and the NVLink cliques."""
    labels = {gpu.label for gpu in hardware.gpus}
    if len(labels) < 2:
        return
    links = tree.below("GPU links")
    for link in hardware.links:
        pairs = [f"{one}-{other}" for one, other in link.pairs if labels.issuperset((one, other))]
        if pairs:
            value = _unknown(link.link) if link.link.value is None else link.link.value
            links.below(f"{value}:", f"{_pairs(pairs, len(labels))}  [{link.link.source}]")
    cliques = [short_ranges([hardware.gpus[place].index for place in clique]) for clique in cliques_of(hardware)]
    tree.below("NVLink cliques:", "; ".join(f"GPU {','.join(clique)}" for clique in cliques) or "none")


def _pairs(pairs: Sequence[str], gpus: int) -> str:
    if len(pairs) == gpus * (gpus - 1) // 2 > 1:
        return f"all {len(pairs)} pairs"
    return ", ".join(pairs) if len(pairs) <= 8 else f"{len(pairs)} pairs"


def _unknown(fact: Fact[Any]) -> str:
    claims = ", ".join(f"{claim.source} says {claim.value}" for claim in fact.claims)
    return f"unknown, {fact.missing}" + (f": {claims}" if claims else "")
