"""Build the topology of a cluster of a known machine type in machines.toml, to draw it or to plan for it."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from toolkit.topology.claims import Answer
from toolkit.topology.facts import NO_FABRIC, Fact, NodeFacts, Topology
from toolkit.topology.probe import settle
from toolkit.topology.readers.topology_address import SwitchPath

__all__ = ["machines", "topology_of_machine"]


@cache
def machines() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of machines.toml by the name of the machine."""
    return tomllib.loads(resources.files(__package__).joinpath("machines.toml").read_text(encoding="utf-8"))


def topology_of_machine(name: str, leaves: Sequence[int]) -> Topology:
    """Return nodes of one machine type, `leaves[i]` of them below leaf switch i, assigned to NVLink racks in order."""
    machine = machines()[name]
    kind, rack = _node(machine), machine.get("nodes_in_clique", 1)

    def printed(value: str) -> Fact[str]:
        return Fact(value, machine["source"], "printed")

    nodes: list[NodeFacts] = []
    for leaf, count in enumerate(leaves):
        for place in range(count):
            host = f"node{len(nodes)}"
            path = SwitchPath(("spine", f"leaf{leaf}"), ("switch", "switch"), host)
            fabric = printed(f"rack{leaf}-{place // rack}" if rack > 1 else NO_FABRIC)
            fabrics = (fabric,) * len(machine["gpu_numa"])
            switches = Fact(path, "--leaves", "printed")
            nodes.append(replace(kind, host=printed(host), switches=switches, gpu_fabrics=fabrics))
    return Topology(tuple(nodes), {})


def _node(machine: Mapping[str, Any]) -> NodeFacts:
    source, gpu_numa, nic_numa = machine["source"], machine["gpu_numa"], machine["nic_numa"]
    labels = [f"GPU{gpu}" for gpu in range(len(gpu_numa))] + [f"mlx5_{nic}" for nic in range(len(nic_numa))]
    answer = Answer(source, "printed", ())
    answer.say(len(gpu_numa), "gpu_count")
    answer.say(True, "nics")
    for numa in sorted({*gpu_numa, *nic_numa}):
        answer.say(True, "numa", numa)
        answer.say(numa // machine["numa_nodes_of_socket"], "numa", numa, "socket")
    for gpu, (numa, *rows) in enumerate(zip(gpu_numa, machine["gpu_links"], machine["nic_links"], strict=True)):
        answer.say(machine.get("gpu_name"), "GPU", gpu, "name")
        answer.say(machine.get("gpu_memory_bytes"), "GPU", gpu, "memory_bytes")
        answer.say(numa, "GPU", gpu, "numa_node")
        links = list(zip(labels, " ".join(rows).split(), strict=True))
        for other, link in links[gpu + 1 :]:
            answer.say(link, "link", f"GPU{gpu}", other)
    for nic, numa in enumerate(nic_numa):
        about = ("nic", f"mlx5_{nic}")
        answer.say(numa, *about, "numa_node")
        answer.say("Active", *about, "port", 1, "state")
        answer.say(machine["nic_gbit_per_s"], *about, "port", 1, "rate")
        answer.say("InfiniBand", *about, "port", 1, "link_layer")
    return settle(Fact("", source, "printed"), [answer])
