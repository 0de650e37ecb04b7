"""Determine the node and GPU of each rank, and the kinds of node (nodes with equal hardware) in a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.topology.facts import Hardware, NodeFacts, Topology
from toolkit.topology.links.nodes import Groups, cliques_of, sockets_of, switches_of, unknown_pairs
from toolkit.topology.names import Notes, first_named

__all__ = ["NodeKind", "Place", "group_at", "kinds_of", "places_of"]


@dataclass(frozen=True)
class Place:
    """The node number of a rank and the index of its GPU on that node; None if unknown."""

    node: int | None
    gpu: int | None


def places_of(topology: Topology, ranks_per_node: int | None, notes: Notes) -> list[Place]:
    """Return the place of each rank: the GPU that the rank reported, otherwise the GPU with its local rank as index.

    If the topology has no ranks, each GPU gets one rank, in the order of the nodes. If `ranks_per_node` is given, every
    node gets this many ranks instead of the ranks of the topology.
    """
    if ranks_per_node is None and topology.size:
        return _places_of_ranks(topology, notes)
    places = []
    for number, node in enumerate(topology.nodes):
        gpus = len(node.hardware.gpus)
        count = ranks_per_node or gpus
        if count == 0:
            notes.add("no GPUs are known, so toolkit assumes one rank", node)
        elif count > gpus > 0:
            notes.add(f"{count} ranks for {gpus} GPUs, so toolkit knows no links between ranks inside the node", node)
        places += [Place(number, gpu if gpu < gpus and count <= gpus else None) for gpu in range(count or 1)]
    return places


def _places_of_ranks(topology: Topology, notes: Notes) -> list[Place]:
    numbers = {node.host.value: number for number, node in enumerate(topology.nodes)}
    places: dict[int, Place] = {rank: Place(None, None) for rank in topology.unplaced_ranks}
    for host, ranks in topology.ranks_by_host.items():
        number = numbers.get(host)
        if number is None:
            notes.add(f"host {host} has ranks but reported no hardware information")
            places |= {rank: Place(None, None) for rank in ranks}
            continue
        node = topology.nodes[number]
        gpus = _gpus_of_ranks(node, [topology.gpu_of_rank.get(rank) for rank in ranks])
        if None in gpus and any(rank in topology.gpu_of_rank for rank in ranks):
            notes.add("ranks use GPUs that the node did not report, so toolkit knows no links inside the node", node)
        places |= {rank: Place(number, gpu) for rank, gpu in zip(ranks, gpus, strict=True)}
    if topology.unplaced_ranks:
        notes.add(
            f"the hosts of {len(topology.unplaced_ranks)} ranks are unknown, so toolkit treats each as on another node"
        )
    return [places[rank] for rank in sorted(places)]


def _gpus_of_ranks(node: NodeFacts, named: list[str | None]) -> list[int | None]:
    """Return the GPU index of each rank of a node, from the UUIDs in `named`, or from local ranks if all are None."""
    uuids = [fact.value for fact in node.gpu_uuids]
    if any(named):
        return [uuids.index(uuid) if uuid and uuid in uuids else None for uuid in named]
    return [local if len(named) <= len(node.hardware.gpus) else None for local in range(len(named))]


@dataclass(frozen=True, eq=False)  # nodes with equal hardware share one object, so identity is enough
class NodeKind:
    """The groups of GPUs on a kind of node, as indices into `hardware.gpus`.

    `sockets` is None if the sockets are unknown, and `sockets_missing` is the reason.
    """

    hardware: Hardware
    cliques: Groups
    switches: Groups
    sockets: Groups | None
    sockets_missing: str

    @property
    def gpus(self) -> tuple[int, ...]:
        """The indices of all GPUs of the node."""
        return tuple(range(len(self.hardware.gpus)))

    @property
    def one_clique(self) -> bool:
        """Whether NVLink connects every pair of GPUs of the node."""
        return self.cliques == (self.gpus,)


def kinds_of(nodes: Sequence[NodeFacts], notes: Notes) -> tuple[NodeKind, ...]:
    """Return the kind of each node; nodes with the same hardware share one object."""
    kinds: dict[int, NodeKind] = {}
    for node in nodes:
        hardware = node.hardware
        if id(hardware) not in kinds:
            kinds[id(hardware)] = NodeKind(hardware, cliques_of(hardware), switches_of(hardware), *_sockets(hardware))
        if hardware.gpu_count.value is None:
            notes.add(f"the number of GPUs is unknown: {hardware.gpu_count.missing}", node)
        if pairs := ["-".join(pair) for pair in unknown_pairs(hardware)]:
            notes.add(f"the links of {first_named(pairs)} are unknown, so toolkit assumes the slowest path", node)
    return tuple(kinds[id(node.hardware)] for node in nodes)


def group_at(groups: Groups, gpu: int) -> int | None:
    """Return the number of the group that contains a GPU; None if no group does."""
    return next((number for number, group in enumerate(groups) if gpu in group), None)


def _sockets(hardware: Hardware) -> tuple[Groups | None, str]:
    """Return (the GPUs grouped by their nearest NUMA node, ""), or (None, the reason why the groups are unknown)."""
    sockets = sockets_of(hardware)
    if sockets is None:
        return None, "the NUMA node of a GPU is unknown"
    if any(len({group_at(sockets, gpu) for gpu in group}) > 1 for group in switches_of(hardware)):
        return None, "the GPUs of one PCIe switch are on several NUMA nodes"
    return sockets, ""
