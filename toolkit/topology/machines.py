"""Machines that many clusters are made of, by their makers' figures: to plan for a cluster that one is not on.

Bandwidths are per GPU and direction. Where one NIC serves several GPUs, each has its part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.topology.tiers import Link, Tiers, tiers_of


@dataclass(frozen=True)
class Machine:
    """A kind of node. `inner` are the tiers below the node: a name, the GPUs of each group, and the link in it.

    `nodes_in_clique` is more than 1 where NVLink joins nodes, `clique` then the link. `fabric` joins nodes.
    """

    name: str
    gpus: int
    inner: tuple[tuple[str, tuple[tuple[int, ...], ...], Link], ...]
    node: Link
    fabric: Link
    nodes_in_clique: int = 1
    clique: Link | None = None


_EVEN = tuple(range(8))
_QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
_A100 = "NVIDIA DGX A100 data sheet: NVLink 600 GB/s both ways, 8 x 200 Gbit/s"
_DGX1 = "NVIDIA DGX-1 data sheet, V100: 6 NVLinks of 25 GB/s, PCIe 3.0 x16, 4 x 100 Gbit/s"
_GB200 = "NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s both ways, 400 Gbit/s a GPU"
_PCIE = "PCI-SIG: PCIe 4.0 x16 is 31.5 GB/s; one NIC of 100 Gbit/s for eight GPUs"

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "dgx-a100", 8, (("clique", (_EVEN,), Link(3e-6, 300e9, _A100)),),
            Link(5e-6, 25e9, _A100), Link(10e-6, 25e9, _A100),
        ),
        Machine(
            "dgx-1", 8, (("clique", _QUADS, Link(3e-6, 75e9, _DGX1)),),
            Link(8e-6, 12e9, _DGX1), Link(10e-6, 6.25e9, _DGX1),
        ),
        Machine(
            "gb200", 4, (), Link(3e-6, 900e9, _GB200), Link(10e-6, 50e9, _GB200), 18, Link(3e-6, 900e9, _GB200),
        ),
        Machine(
            "pcie-8", 8,
            (("switch", _PAIRS, Link(6e-6, 25e9, _PCIE)), ("socket", _QUADS, Link(8e-6, 12e9, _PCIE))),
            Link(10e-6, 8e9, _PCIE), Link(15e-6, 1.56e9, _PCIE),
        ),
    )
}  # fmt: skip


def cluster_of(machine: Machine, leaves: Sequence[int], ranks_per_node: int | None = None) -> Tiers:
    """Nodes of one kind, `leaves[i]` of them below leaf switch i, with a rank for each GPU, or for the first ones.

    Nothing says how leaves are joined, so the link between them is that of nodes: a fabric that does not block.
    """
    used = machine.gpus if ranks_per_node is None else ranks_per_node
    if not 0 < used <= machine.gpus:
        raise ToolkitError(
            f"{used} ranks on a {machine.name}, which has {machine.gpus} GPUs", where="topo groups", fix="mend --ntasks"
        )
    leaf_of = [leaf for leaf, count in enumerate(leaves) for _ in range(count)]
    places = [(node, gpu) for node in range(len(leaf_of)) for gpu in range(used)]
    columns: list[tuple[str, Sequence[object], Link]] = []
    for name, groups, link in machine.inner:
        number = {gpu: index for index, group in enumerate(groups) for gpu in group}
        columns.append((name, [(node, number[gpu]) for node, gpu in places], link))
    columns.append(("node", [node for node, _ in places], machine.node))
    if machine.clique is not None:
        racks = [
            (leaf_of[node], (node - leaf_of.index(leaf_of[node])) // machine.nodes_in_clique) for node, _ in places
        ]
        columns.append(("clique", racks, machine.clique))
    columns.append(("leaf", [leaf_of[node] for node, _ in places], machine.fabric))
    columns.append(("cluster", [0] * len(places), machine.fabric))
    return tiers_of(columns)
