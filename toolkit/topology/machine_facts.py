"""Facts of clusters of known machines, from the vendors' guides, to draw them and to plan for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit.topology.claims import Answer
from toolkit.topology.facts import Fact, NodeFacts, Topology
from toolkit.topology.probe import settle
from toolkit.topology.readers.topology_address import SwitchPath

# Rows of `nvidia-smi topo -m` on a DGX-1 with V100: a cube with one or two NVLinks on each edge.
_CUBE = (
    "X NV1 NV1 NV2 NV2 SYS SYS SYS", "NV1 X NV2 NV1 SYS NV2 SYS SYS", "NV1 NV2 X NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X SYS SYS SYS NV1", "NV2 SYS SYS SYS X NV1 NV1 NV2", "SYS NV2 SYS SYS NV1 X NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X NV2", "SYS SYS SYS NV1 NV2 NV1 NV2 X",
)  # fmt: skip


@dataclass(frozen=True)
class MachineSpec:
    """The specification of a kind of node; `numa_of` are the NUMA nodes of the GPUs, `nic_numa_of` those of the NICs."""

    source: str
    gpu_name: str
    memory_bytes: int
    numa_of: tuple[int, ...]
    numa_nodes_of_socket: int
    nic_numa_of: tuple[int, ...]
    nic_gbit_per_s: float
    gpu_link: Callable[[int, int], str]
    nic_link: Callable[[int, int], str]
    nodes_in_clique: int = 1


def _pairs(one: int, other: int) -> str:
    return "PIX" if one // 2 == other // 2 else "NODE" if one // 4 == other // 4 else "SYS"


def _own_switch(link: str) -> Callable[[int, int], str]:
    """The link to NICs on the switch of a pair of GPUs; SYS to all other NICs."""

    def between(gpu: int, nic: int) -> str:
        return link if gpu // 2 == nic // 2 else "SYS"

    return between


PLANS = {
    "dgx-a100": MachineSpec(
        "NVIDIA DGX A100 user guide", "NVIDIA A100-SXM4-80GB", 80 * 2**30, (3, 3, 1, 1, 7, 7, 5, 5), 4,
        (3, 3, 1, 1, 7, 7, 5, 5), 200.0, lambda one, other: "NV12", _own_switch("PXB"),
    ),
    "dgx-1": MachineSpec(
        "NVIDIA DGX-1 user guide", "Tesla V100-SXM2-32GB", 32 * 2**30, (0, 0, 0, 0, 1, 1, 1, 1), 1, (0, 0, 1, 1), 100.0,
        lambda one, other: _CUBE[one].split()[other],
        lambda gpu, nic: "PIX" if gpu // 2 == nic else "NODE" if gpu // 4 == nic // 2 else "SYS",
    ),
    "gb200": MachineSpec(
        "NVIDIA GB200 NVL72 data sheet", "NVIDIA GB200", 186 * 2**30, (0, 0, 1, 1), 1, (0, 0, 1, 1), 400.0,
        lambda one, other: "NV18", lambda gpu, nic: "PHB" if gpu == nic else "NODE" if gpu // 2 == nic // 2 else "SYS",
        nodes_in_clique=18,
    ),
    "pcie-8": MachineSpec(
        "assumption: a PCIe switch for two GPUs, a NIC for eight", "", 0, (0, 0, 0, 0, 1, 1, 1, 1), 1, (0,), 100.0,
        _pairs, lambda gpu, nic: "NODE" if gpu < 4 else "SYS",
    ),
}  # fmt: skip


def topology_of_machine(name: str, leaves: Sequence[int]) -> Topology:
    """Nodes of one kind, `leaves[i]` of them below leaf switch i; each leaf fills its NVLink racks in order."""
    plan = PLANS[name]
    kind = _node(plan)
    nodes: list[NodeFacts] = []
    for leaf, count in enumerate(leaves):
        for place in range(count):
            host = f"node{len(nodes)}"
            path = SwitchPath(("spine", f"leaf{leaf}"), ("switch", "switch"), host)
            fabric = Fact(
                f"rack{leaf}-{place // plan.nodes_in_clique}" if plan.nodes_in_clique > 1 else "none",
                plan.source,
                "printed",
            )
            nodes.append(
                replace(
                    kind,
                    host=Fact(host, plan.source, "printed"),
                    switches=Fact(path, "--leaves", "printed"),
                    gpu_fabrics=(fabric,) * len(plan.numa_of),
                )
            )
    return Topology(tuple(nodes), {})


def _node(plan: MachineSpec) -> NodeFacts:
    answer = Answer(plan.source, "printed", ())
    answer.say(len(plan.numa_of), "gpu_count")
    answer.say(True, "nics")
    for numa in sorted({*plan.numa_of, *plan.nic_numa_of}):
        answer.say(numa // plan.numa_nodes_of_socket, "numa", numa, "socket")
    for gpu, numa in enumerate(plan.numa_of):
        answer.say(plan.gpu_name or None, "GPU", gpu, "name")
        answer.say(plan.memory_bytes or None, "GPU", gpu, "memory_bytes")
        answer.say(numa, "GPU", gpu, "numa_node")
        for other in range(gpu + 1, len(plan.numa_of)):
            answer.say(plan.gpu_link(gpu, other), "link", f"GPU{gpu}", f"GPU{other}")
        for nic in range(len(plan.nic_numa_of)):
            answer.say(plan.nic_link(gpu, nic), "link", f"GPU{gpu}", f"mlx5_{nic}")
    for nic, numa in enumerate(plan.nic_numa_of):
        about = ("nic", f"mlx5_{nic}")
        answer.say(numa, *about, "numa_node")
        answer.say("Active", *about, "port", 1, "state")
        answer.say(plan.nic_gbit_per_s, *about, "port", 1, "rate")
        answer.say("InfiniBand", *about, "port", 1, "link_layer")
    return settle(Fact("", plan.source, "printed"), [answer])
