"""NUMA nodes with their processors and memory, from `numactl -H`."""

from __future__ import annotations

from toolkit.topology.claims import Answer
from toolkit.topology.readers.numactl import parse_numactl
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, read_text, run_command
from toolkit.world.cpu_lists import cpu_list

COMMAND = ("numactl", "-H")
TELLS = (("numa_nodes",), ("numa", None, "cpus"), ("numa", None, "memory_mib"))


def ask_numactl(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Run `numactl -H` and claim what it prints."""
    answer = Answer(" ".join(COMMAND), "printed", tells=TELLS)
    result = run_command(COMMAND, timeout_s)
    if result.output is None:
        answer.miss(result.missing)
        return answer
    facts = read_text(result.output, parse_numactl, answer)
    for number, node in (facts.nodes if facts else {}).items():
        answer.claims["numa", number] = True
        answer.say(None if node.cpus is None else cpu_list(node.cpus), "numa", number, "cpus")
        answer.say(node.size_mib, "numa", number, "memory_mib")
    return answer
