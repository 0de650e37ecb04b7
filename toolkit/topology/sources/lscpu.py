"""Sockets and the processors of NUMA nodes, from `lscpu`."""

from __future__ import annotations

from toolkit.topology.claims import Answer
from toolkit.topology.readers.lscpu import parse_lscpu
from toolkit.topology.sources.commands import COMMAND_TIMEOUT_S, read_text, run_command
from toolkit.world.cpu_lists import cpu_list

COMMAND = ("lscpu",)
TELLS = (("sockets",), ("numa_nodes",), ("numa", None, "cpus"))


def ask_lscpu(timeout_s: float = COMMAND_TIMEOUT_S) -> Answer:
    """Run `lscpu` and claim what it prints."""
    answer = Answer("lscpu", "printed", tells=TELLS)
    result = run_command(COMMAND, timeout_s)
    if result.output is None:
        answer.miss(result.missing)
        return answer
    facts = read_text(result.output, parse_lscpu, answer)
    if facts is None:
        return answer
    answer.say(facts.sockets, "sockets")
    for node, cpus in (facts.node_cpus or {}).items():
        answer.claims["numa", node] = True
        answer.say(None if cpus is None else cpu_list(cpus), "numa", node, "cpus")
    return answer
