"""Read `lstopo`: how many packages, NUMA nodes, cores, caches and devices a host has.

Read are what it prints on a terminal (`lstopo-no-graphics`, with and without `-v`) and XML (`--of xml`).
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.host_lines import read_lines
from toolkit.topology.parsers.lstopo_console import is_console, read_console
from toolkit.topology.parsers.lstopo_facts import HostObjects
from toolkit.topology.parsers.lstopo_xml import read_topology_xml

KEYS = {
    "packages": "how many packages (sockets)",
    "numa_nodes": "how many NUMA nodes, those of memory alone too",
    "cores": "how many cores",
    "pus": "how many processing units (hardware threads)",
    "l3": "how many L3 caches",
    "host_bridges": "how many host bridges: roots of a PCI tree",
    "pci": "how many PCI devices, without bridges",
    "groups": "how many groups: levels that hwloc made up from distances, or that have no name of their own",
    "osdevs": "how many devices as the operating system has them: network, disk, GPU",
    "memory_only_nodes": "how many NUMA nodes have no processors of their own: a second one at the same place, or memory "
    "of a device",
}


def parse_lstopo(text: str) -> tuple[HostObjects, tuple[str, ...]]:
    """Read the whole output: (facts, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of lstopo, or XML that declares entities.
    """
    if text.lstrip().startswith("<"):
        facts, warnings = read_topology_xml(text)
        return facts, tuple(warnings)
    lines, warnings = read_lines(text)
    if not is_console(lines):
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"nothing that lstopo prints{said}", where=f"line {lines[0].number if lines else 1}")
    return read_console(lines, warnings), tuple(warnings)


def answer_lstopo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it is no output of lstopo, or XML that declares entities.
    """
    facts, warnings = parse_lstopo(text)
    return {
        "packages": facts.packages,
        "numa_nodes": facts.numa_nodes,
        "cores": facts.cores,
        "pus": facts.processing_units,
        "l3": facts.l3_caches,
        "host_bridges": facts.host_bridges,
        "pci": facts.pci_devices,
        "groups": facts.groups,
        "osdevs": facts.os_devices,
        "memory_only_nodes": facts.memory_only_nodes,
    }, warnings
