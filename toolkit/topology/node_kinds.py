"""The kinds of node in a cluster: the groups of GPUs in each kind, and notes about unknown facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.topology.facts import Hardware, NodeFacts
from toolkit.topology.links.nodes import Groups, cliques_of, sockets_of, switches_of, unknown_pairs
from toolkit.topology.names import Notes, first_named

__all__ = ["NodeKind", "group_at", "kinds_of"]


@dataclass(frozen=True, eq=False)  # nodes with equal hardware share one object, so identity is enough
class NodeKind:
    """The groups of GPUs that follow from a node's hardware, as indices into `hardware.gpus`.

    `sockets` is None if they are unknown; `sockets_missing` is the reason.
    """

    hardware: Hardware
    cliques: Groups
    switches: Groups
    sockets: Groups | None
    sockets_missing: str

    @property
    def gpus(self) -> tuple[int, ...]:
        """The indices of all its GPUs."""
        return tuple(range(len(self.hardware.gpus)))

    @property
    def one_clique(self) -> bool:
        """Whether NVLink joins every pair of its GPUs."""
        return self.cliques == (self.gpus,)


def kinds_of(nodes: Sequence[NodeFacts], notes: Notes) -> tuple[NodeKind, ...]:
    """The kind of each node; nodes with the same hardware share one kind."""
    kinds: dict[int, NodeKind] = {}
    for node in nodes:
        hardware = node.hardware
        if id(hardware) not in kinds:
            kinds[id(hardware)] = NodeKind(hardware, cliques_of(hardware), switches_of(hardware), *_sockets(hardware))
        if hardware.gpu_count.value is None:
            notes.add(f"the number of GPUs is unknown: {hardware.gpu_count.missing}", node)
        if pairs := ["-".join(pair) for pair in unknown_pairs(hardware)]:
            notes.add(f"the links of {first_named(pairs)} are unknown, so they share no tier finer than the node", node)
    return tuple(kinds[id(node.hardware)] for node in nodes)


def group_at(groups: Groups, gpu: int) -> int | None:
    """The number of the group that contains a GPU; None if no group does."""
    return next((number for number, group in enumerate(groups) if gpu in group), None)


def _sockets(hardware: Hardware) -> tuple[Groups | None, str]:
    """(GPUs grouped by the nearest NUMA node, the reason if these groups are unknown)."""
    sockets = sockets_of(hardware)
    if sockets is None:
        return None, "the NUMA node of a GPU is unknown"
    if any(len({group_at(sockets, gpu) for gpu in group}) > 1 for group in switches_of(hardware)):
        return None, "the GPUs of one PCIe switch are on several NUMA nodes"
    return sockets, ""
