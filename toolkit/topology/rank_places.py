"""Where each rank of a topology stands: on which node, and on which of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.topology.facts import NodeFacts, Topology
from toolkit.topology.names import Notes


@dataclass(frozen=True)
class Place:
    """Where a rank stands: the number of its node and the place of its GPU there; None where that is unknown."""

    node: int | None
    gpu: int | None


def places_of(topology: Topology, ranks_per_node: int | None, notes: Notes) -> list[Place]:
    """The place of each rank of the topology, on the GPU that it named, else on that of its local rank.

    Without ranks, one for each GPU, nodes in their order; with `ranks_per_node` so many on each node instead, whatever
    ranks the topology has.
    """
    if ranks_per_node is None and topology.size:
        return _places_of_ranks(topology, notes)
    places = []
    for number, node in enumerate(topology.nodes):
        gpus = len(node.hardware.gpus)
        count = ranks_per_node or gpus
        if count == 0:
            notes.add("no GPU is known, and one rank is counted", node)
        elif count > gpus > 0:
            notes.add(f"{count} ranks have {gpus} GPUs, so that they meet in the node alone", node)
        places += [Place(number, place if place < gpus and count <= gpus else None) for place in range(count or 1)]
    return places


def _places_of_ranks(topology: Topology, notes: Notes) -> list[Place]:
    numbers = {node.host.value: number for number, node in enumerate(topology.nodes)}
    places: dict[int, Place] = {rank: Place(None, None) for rank in topology.unplaced_ranks}
    for host, ranks in topology.ranks_by_host.items():
        number = numbers.get(host)
        if number is None:
            notes.add(f"{host} has ranks and told no facts")
            places |= {rank: Place(None, None) for rank in ranks}
            continue
        node = topology.nodes[number]
        gpus = _gpus_of_ranks(node, [topology.gpu_of_rank.get(rank) for rank in ranks])
        if None in gpus and any(rank in topology.gpu_of_rank for rank in ranks):
            notes.add("ranks are on GPUs that it did not tell of, and meet in the node alone", node)
        places |= {rank: Place(number, gpu) for rank, gpu in zip(ranks, gpus, strict=True)}
    if topology.unplaced_ranks:
        notes.add(
            f"the hosts of {len(topology.unplaced_ranks)} ranks are unknown, so that they meet in the cluster alone"
        )
    return [places[rank] for rank in sorted(places)]


def _gpus_of_ranks(node: NodeFacts, named: list[str | None]) -> list[int | None]:
    """The place of the GPU of each rank of a node, by the UUIDs that ranks named; by local ranks where none did."""
    uuids = [fact.value for fact in node.gpu_uuids]
    if any(named):
        return [uuids.index(uuid) if uuid and uuid in uuids else None for uuid in named]
    return [local if len(named) <= len(node.hardware.gpus) else None for local in range(len(named))]
