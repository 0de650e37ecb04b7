"""Where each rank of a topology stands: on which node, and on which of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.topology.facts import Topology
from toolkit.topology.notes import Notes


@dataclass(frozen=True)
class Place:
    """Where a rank stands: the number of its node and the place of its GPU there; None where that is unknown."""

    node: int | None
    gpu: int | None


def places_of(topology: Topology, ranks_per_node: int | None, notes: Notes) -> list[Place]:
    """The place of each rank of the topology, on the GPU of its local rank.

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
        gpus = len(topology.nodes[number].hardware.gpus) if number is not None else 0
        if number is None:
            notes.add(f"{host} has ranks and told no facts")
        for local, rank in enumerate(ranks):
            places[rank] = Place(number, local if len(ranks) <= gpus else None)
    if topology.unplaced_ranks:
        notes.add(
            f"the hosts of {len(topology.unplaced_ranks)} ranks are unknown, so that they meet in the cluster alone"
        )
    return [places[rank] for rank in sorted(places)]
