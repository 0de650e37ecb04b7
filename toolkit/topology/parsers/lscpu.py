"""Read `lscpu`: processors, cores, sockets and NUMA nodes, from its summary or its tables (`-e`, `-p`)."""

from __future__ import annotations

from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.cpu_lists import cpu_list
from toolkit.topology.parsers.host_lines import read_lines
from toolkit.topology.parsers.lscpu_facts import Processors
from toolkit.topology.parsers.lscpu_summary import is_summary, read_summary
from toolkit.topology.parsers.lscpu_table import is_table, read_table

KEYS = {
    "cpus": "how many processors (hardware threads) there are, those that are offline too",
    "numa_nodes": "how many NUMA nodes",
    "sockets": "how many sockets",
    "cores": "how many cores in all sockets",
    "threads_per_core": "how many hardware threads a core has; where cores differ, the most",
    "node0_cpus": "the processors of NUMA node 0, each of them",
    "node_cpus": 'the processors of each NUMA node by its number, as a list with ranges ("0-15,64-79")',
}


def parse_lscpu(text: str) -> tuple[Processors, tuple[str, ...]]:
    """Read the whole output: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of lscpu.
    """
    lines, warnings = read_lines(text)
    if is_table(lines):
        facts = read_table(lines, warnings)
    elif is_summary(lines):
        facts = read_summary(lines, warnings)
    else:
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"nothing that lscpu prints{said}", where=f"line {lines[0].number if lines else 1}")
    return facts, tuple(warnings)


def answer_lscpu(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it is no output of lscpu.
    """
    facts, warnings = parse_lscpu(text)
    nodes = facts.node_cpus
    return {
        "cpus": facts.cpus,
        "numa_nodes": facts.numa_nodes,
        "sockets": facts.sockets,
        "cores": facts.cores,
        "threads_per_core": facts.threads_per_core,
        "node0_cpus": None if nodes is None or nodes.get(0) is None else list(nodes[0] or ()),
        "node_cpus": None
        if nodes is None
        else {str(node): None if cpus is None else cpu_list(cpus) for node, cpus in nodes.items()},
    }, warnings
