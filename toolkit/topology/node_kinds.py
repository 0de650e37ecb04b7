"""The kinds of node in a cluster: which GPUs of a kind belong together, and what of it is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.topology.facts import Hardware, NodeFacts
from toolkit.topology.links.nodes import Groups, cliques_of, sockets_of, switches_of, unknown_pairs
from toolkit.topology.names import Notes, first_named


@dataclass(frozen=True, eq=False)  # equal hardware stands in memory once: a kind is itself and no other
class NodeKind:
    """What follows from the hardware of a node: groups of places in `hardware.gpus`.

    `sockets` is None where they cannot be told apart; `sockets_missing` says why.
    """

    hardware: Hardware
    cliques: Groups
    switches: Groups
    sockets: Groups | None
    sockets_missing: str

    @property
    def gpus(self) -> tuple[int, ...]:
        """The places of all its GPUs."""
        return tuple(range(len(self.hardware.gpus)))

    @property
    def one_clique(self) -> bool:
        """Whether NVLink joins every pair of its GPUs."""
        return self.cliques == (self.gpus,)


def kinds_of(nodes: Sequence[NodeFacts], notes: Notes) -> tuple[NodeKind, ...]:
    """The kind of each node, the same one for nodes with the same hardware."""
    kinds: dict[int, NodeKind] = {}
    for node in nodes:
        hardware = node.hardware
        if id(hardware) not in kinds:
            kinds[id(hardware)] = NodeKind(hardware, cliques_of(hardware), switches_of(hardware), *_sockets(hardware))
        if hardware.gpu_count.value is None:
            notes.add(f"how many GPUs there are is unknown: {hardware.gpu_count.missing}", node)
        if pairs := ["-".join(pair) for pair in unknown_pairs(hardware)]:
            notes.add(f"the links of {first_named(pairs)} are unknown, so that they meet in the node alone", node)
    return tuple(kinds[id(node.hardware)] for node in nodes)


def group_at(groups: Groups, place: int) -> int | None:
    """The number of the group that a GPU is in; None for one that is alone."""
    return next((number for number, group in enumerate(groups) if place in group), None)


def _sockets(hardware: Hardware) -> tuple[Groups | None, str]:
    """(GPUs by the NUMA node next to them, why there is none)."""
    sockets = sockets_of(hardware)
    if sockets is None:
        return None, "the NUMA node of a GPU is unknown"
    if any(len({group_at(sockets, place) for place in group}) > 1 for group in switches_of(hardware)):
        return None, "GPUs behind one PCIe switch are next to several NUMA nodes"
    return sockets, ""
