"""Claim sockets and NUMA nodes with their processors and memory, from `lscpu` and `numactl -H`, if /sys has none."""

from __future__ import annotations

from toolkit.topology.claims import Answer
from toolkit.topology.readers.lscpu import parse_lscpu
from toolkit.topology.readers.numactl import parse_numactl
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, ask_command
from toolkit.world.cpu_lists import cpu_list

__all__ = ["ask_lscpu", "ask_numactl"]

_NODES = (("numa_nodes",), ("numa", None, "cpus"))


def ask_lscpu(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """The claims in the output of `lscpu`."""
    answer, facts = ask_command(("lscpu",), parse_lscpu, (("sockets",), *_NODES), timeout_s)
    if facts is not None:
        answer.say(facts.sockets, "sockets")
        for node, cpus in (facts.node_cpus or {}).items():
            _claim_cpus(answer, node, cpus)
    return answer


def ask_numactl(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """The claims in the output of `numactl -H`."""
    covers = (*_NODES, ("numa", None, "memory_mib"))
    answer, facts = ask_command(("numactl", "-H"), parse_numactl, covers, timeout_s)
    for number, node in (facts.nodes if facts else {}).items():
        _claim_cpus(answer, number, node.cpus)
        answer.say(node.size_mib, "numa", number, "memory_mib")
    return answer


def _claim_cpus(answer: Answer, node: int, cpus: tuple[int, ...] | None) -> None:
    answer.claims["numa", node] = True
    answer.say(None if cpus is None else cpu_list(cpus), "numa", node, "cpus")
