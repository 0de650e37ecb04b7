"""The tiers of a cluster from the facts of its nodes. What is unknown makes a coarser tier, and a line that says so."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from toolkit.errors import ToolkitError
from toolkit.topology.facts import NO_FABRIC, Hardware, NodeFacts, Topology
from toolkit.topology.node_links import Groups, cliques_of, links_within, sockets_of, switches_of, unknown_pairs
from toolkit.topology.nominal_links import fabric, nvlink, pcie
from toolkit.topology.tiers import Link, Tiers, tiers_of

_NAMED = 3  # hosts that a line names before it counts the others


@dataclass(frozen=True)
class Place:
    """Where a rank stands: the number of its node and the place of its GPU there; None where that is unknown."""

    node: int | None
    gpu: int | None


@dataclass
class _Kind:
    """What follows from one kind of node: groups of GPUs, and what is unknown."""

    hardware: Hardware
    cliques: Groups
    switches: Groups
    sockets: Groups | None
    sockets_missing: str
    lines: list[str] = field(default_factory=list)


def tiers_of_topology(topology: Topology, ranks_per_node: int | None = None, notes: list[str] | None = None) -> Tiers:
    """NVLink cliques, or PCIe switches and sockets, then nodes, leaves and the cluster.

    Args:
        topology: its ranks, each on the GPU of its local rank. Without ranks, one for each GPU, nodes in their order.
        ranks_per_node: so many on each node instead, whatever ranks the topology has.
        notes: told what is unknown, and what follows.

    Raises:
        ToolkitError: there is no node.
    """
    return _Finding(topology, ranks_per_node, [] if notes is None else notes).tiers()


class _Finding:
    """One topology on its way to tiers."""

    def __init__(self, topology: Topology, ranks_per_node: int | None, notes: list[str]) -> None:
        self.nodes = topology.nodes
        self.notes = notes
        self.said: dict[str, list[str]] = {}
        self.kinds: dict[int, _Kind] = {}
        if not self.nodes:
            raise ToolkitError(
                "no node has told its facts", where="topology", fix="run `toolkit topo show` on each node"
            )
        for node in self.nodes:
            kind = self._kind(node)
            for line in kind.lines:
                self._note(line, node)
        self.places = self._places(topology, ranks_per_node)

    def tiers(self) -> Tiers:
        spanning = self._fabrics()
        leaves = self._leaves(spanning)
        whole = bool(spanning)
        columns = [] if whole else self._inside()
        nodes = self._nodes()
        columns.append(("node", nodes, self._node_link(whole)))
        if whole:
            columns.append(
                ("clique", [spanning.get(node, node) for node in nodes], self._clique_link(between_nodes=True))
            )
        between = self._fabric_link()
        if leaves:
            columns.append(("leaf", [leaves.get(node, node) for node in nodes], between))
        columns.append(("cluster", [0] * len(self.places), between))
        self.notes += [f"{_hosts(hosts)}: {line}" if hosts else line for line, hosts in self.said.items()]
        return tiers_of(columns)

    def _note(self, line: str, node: NodeFacts | None = None) -> None:
        hosts = self.said.setdefault(line, [])
        if node is not None:
            hosts.append(node.host.value or "a node without a name")

    def _kind(self, node: NodeFacts) -> _Kind:
        hardware = node.hardware
        if id(hardware) not in self.kinds:
            kind = _Kind(hardware, cliques_of(hardware), switches_of(hardware), *_sockets(hardware))
            if hardware.gpu_count.value is None:
                kind.lines.append(f"how many GPUs there are is unknown: {hardware.gpu_count.missing}")
            if pairs := unknown_pairs(hardware):
                kind.lines.append(f"the links of {_pairs(pairs)} are unknown, so that they meet in the node alone")
            self.kinds[id(hardware)] = kind
        return self.kinds[id(hardware)]

    def _places(self, topology: Topology, ranks_per_node: int | None) -> list[Place]:
        if ranks_per_node is None and topology.size:
            return self._places_of_ranks(topology)
        places = []
        for number, node in enumerate(self.nodes):
            gpus = len(node.hardware.gpus)
            count = ranks_per_node or gpus
            if count == 0:
                self._note("no GPU is known, and one rank is counted", node)
            elif count > gpus > 0:
                self._note(f"{count} ranks have {gpus} GPUs, so that they meet in the node alone", node)
            places += [Place(number, place if place < gpus and count <= gpus else None) for place in range(count or 1)]
        return places

    def _places_of_ranks(self, topology: Topology) -> list[Place]:
        numbers = {node.host.value: number for number, node in enumerate(self.nodes)}
        places: dict[int, Place] = {rank: Place(None, None) for rank in topology.unplaced_ranks}
        for host, ranks in topology.ranks_by_host.items():
            number = numbers.get(host)
            gpus = len(self.nodes[number].hardware.gpus) if number is not None else 0
            if number is None:
                self._note(f"{host} has ranks and told no facts")
            for local, rank in enumerate(ranks):
                places[rank] = Place(number, local if len(ranks) <= gpus else None)
        if topology.unplaced_ranks:
            self._note(
                f"the hosts of {len(topology.unplaced_ranks)} ranks are unknown, so that they meet in the cluster alone"
            )
        return [places[rank] for rank in sorted(places)]

    def _nodes(self) -> list[Hashable]:
        """The node of each rank; a rank on no known node is alone."""
        return [("alone", rank) if place.node is None else place.node for rank, place in enumerate(self.places)]

    def _inside(self) -> list[tuple[str, list[Hashable], Link]]:
        """Tiers finer than a node: cliques where there is NVLink, else what PCIe tells."""
        kinds = list(self.kinds.values())
        if any(kind.cliques for kind in kinds):
            for node in self.nodes:
                kind = self._kind(node)
                if kind.hardware.gpus and not kind.cliques:
                    self._note("no NVLink is known, other nodes have it: its GPUs meet in the node alone", node)
            return [("clique", self._labels("clique"), self._clique_link(between_nodes=False))]
        columns: list[tuple[str, list[Hashable], Link]] = []
        if any(kind.switches for kind in kinds):
            links = [link for kind in kinds for group in kind.switches for link in links_within(kind.hardware, group)]
            columns.append(("switch", self._labels("switch"), pcie(links)))
        for node in self.nodes:
            kind = self._kind(node)
            if kind.sockets is None:
                self._note(f"{kind.sockets_missing}, so that sockets are not told apart", node)
        if any(kind.sockets and len(kind.sockets) > 1 for kind in kinds):
            links = [
                link
                for kind in kinds
                for group in kind.sockets or ()
                for link in links_within(kind.hardware, group)
                if link not in ("PIX", "PXB")
            ]
            columns.append(("socket", self._labels("socket"), pcie(links or ["PHB"])))
        return columns

    def _labels(self, tier: str) -> list[Hashable]:
        """The group of each rank in a tier below the node. A GPU in no clique, or behind no switch, is alone there."""
        labels: list[Hashable] = []
        for number, place in enumerate(self.places):
            group = None
            if place.node is not None and place.gpu is not None:
                kind = self._kind(self.nodes[place.node])
                groups = {"clique": kind.cliques, "switch": kind.switches, "socket": kind.sockets}[tier]
                group = _group_at(groups or (), place.gpu)
            # Of a node without known sockets each GPU is alone there: they meet in the node.
            labels.append(("alone", number) if group is None else (place.node, group))
        return labels

    def _fabrics(self) -> dict[Hashable, Hashable]:
        """The NVLink fabric clique of each node that shares one with another node."""
        found: dict[Hashable, Hashable] = {}
        for number, node in enumerate(self.nodes):
            told = {fact.value for fact in node.gpu_fabrics}
            if None in told and self._kind(node).cliques:
                missing = next(fact.missing for fact in node.gpu_fabrics if fact.value is None)
                self._note(
                    f"the NVLink fabric is unknown ({missing}), so that NVLink is taken to end at the node", node
                )
            elif len(told - {None}) > 1:
                self._note("its GPUs are in several NVLink fabrics, so that NVLink is taken to end at the node", node)
            elif told and (label := told.pop()) not in (None, NO_FABRIC):
                found[number] = ("fabric", label)
        count = list(found.values())
        spanning = {number: label for number, label in found.items() if count.count(label) > 1}
        for number, node in enumerate(self.nodes if spanning else ()):
            if number not in spanning and self._kind(node).cliques:
                self._note("NVLink joins other nodes, not this one; its own NVLink is not told apart", node)
        return spanning

    def _leaves(self, spanning: dict[Hashable, Hashable]) -> dict[Hashable, Hashable]:
        """The leaf of each node. Leaves that one clique lies in are one, since a tier lies in one of the next."""
        leaves: dict[Hashable, Hashable] = {}
        for number, node in enumerate(self.nodes):
            path = node.switches.value
            leaf = path.leaf if path else None
            leaves[number] = ("unknown", number) if leaf is None else leaf
            if leaf is None:
                reason = "Slurm names no switch above it" if path else node.switches.missing
                self._note(f"the leaf switch is unknown ({reason}), so that it meets others in the cluster", node)
        if all(isinstance(leaf, tuple) for leaf in leaves.values()):
            return {}
        for label in dict.fromkeys(spanning.values()):
            met = {leaves[number] for number in leaves if spanning.get(number) == label}
            if len(met) > 1:
                self._note("an NVLink clique has nodes below several leaf switches, which count as one leaf")
                joined = min(met, key=str)
                leaves = {number: joined if leaf in met else leaf for number, leaf in leaves.items()}
        return leaves

    def _clique_link(self, *, between_nodes: bool) -> Link:
        found = []
        for kind in self.kinds.values():
            for group in kind.cliques:
                links = links_within(kind.hardware, group)
                # A fabric that joins nodes has switches, whatever few GPUs one node has.
                found.append(nvlink(kind.hardware, links, 2 if between_nodes else len(group)))
        if not found:
            return nvlink(next(iter(self.kinds.values())).hardware, [], 2)
        return min(found, key=lambda link: link.bytes_per_s)

    def _node_link(self, whole: bool) -> Link:
        """The slowest way between two GPUs of a node that are in no finer group together."""
        if whole:
            return self._clique_link(between_nodes=True)
        found = []
        for kind in self.kinds.values():
            everybody = tuple(range(len(kind.hardware.gpus)))
            if kind.cliques == (everybody,):
                found.append(nvlink(kind.hardware, links_within(kind.hardware, everybody), len(everybody)))
            else:
                found.append(pcie(links_within(kind.hardware, everybody)))
        return min(found, key=lambda link: link.bytes_per_s)

    def _fabric_link(self) -> Link:
        counts: dict[int, int] = {}
        for place in self.places:
            if place.node is not None:
                counts[place.node] = counts.get(place.node, 0) + 1
        most: dict[int, int] = {}
        for number, count in counts.items():
            kind = id(self.nodes[number].hardware)
            most[kind] = max(most.get(kind, 0), count)
        found = [fabric(self.kinds[kind].hardware, count) for kind, count in most.items()]
        unknown = {kind for kind, (_, known) in zip(most, found, strict=True) if not known}
        for node in self.nodes:
            if id(node.hardware) in unknown:
                self._note("the rate of its NICs is unknown", node)
        return min((link for link, _ in found), key=lambda link: link.bytes_per_s, default=Link(1e-5, 1e9, "assumed"))


def _sockets(hardware: Hardware) -> tuple[Groups | None, str]:
    """(GPUs by the NUMA node next to them, why there is none)."""
    sockets = sockets_of(hardware)
    if sockets is None:
        return None, "the NUMA node of a GPU is unknown"
    if any(len({_group_at(sockets, place) for place in group}) > 1 for group in switches_of(hardware)):
        return None, "GPUs behind one PCIe switch are next to several NUMA nodes"
    return sockets, ""


def _group_at(groups: Groups, place: int) -> int | None:
    return next((number for number, group in enumerate(groups) if place in group), None)


def _pairs(pairs: list[tuple[str, str]]) -> str:
    said = ", ".join("-".join(pair) for pair in pairs[:_NAMED])
    return said + (f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else "")


def _hosts(hosts: Iterable[str]) -> str:
    named = list(hosts)
    return ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")
