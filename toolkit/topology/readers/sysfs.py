"""Read a listing of files below /sys, one `path: value` or `path -> target` a line: NUMA nodes, PCI and InfiniBand.

`grep -r . /sys/devices/system/node` prints such lines. Linux states the processors twice, as a list and as a mask: if
the two differ, they are unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from toolkit.topology.readers.distances import Row, read_distances
from toolkit.topology.readers.lines import first_damaged, read_lines, refusal
from toolkit.topology.readers.sysfs_devices import read_infiniband, read_pci
from toolkit.topology.readers.sysfs_facts import File, NumaNode, SystemFiles
from toolkit.world.cpu_lists import cpu_list, read_cpu_list, read_cpu_mask

KEYS = {
    "numa_nodes": "how many NUMA nodes; as all counts and lists below, null if none is listed or a line is damaged",
    "nodes": "each of them by its number: cpulist, its processors as a list with ranges; cpumap, the same as a mask; "
    "distance, to each node in their order, 10 to itself",
    "pci_devices": "how many PCI devices, bridges too",
    "gpus": "the PCI addresses of GPUs: display devices of NVIDIA and AMD",
    "mellanox": "the PCI addresses of devices of Mellanox",
    "numa_node_minus_one": "how many PCI devices have the NUMA node -1: the firmware does not state it",
}
_FILE = re.compile(r"(/sys/\S*?[^\s:])(?::(?: (.*))?| -> (.+))")
_FILE_OF_GREP = re.compile(r"(/sys/\S*?/[A-Za-z0-9_]+):([^/]*)()")  # without a blank; addresses have colons, too
_NODE = re.compile(r"/sys/devices/system/node/node([0-9]{1,5})/(cpulist|cpumap|distance|meminfo)")
_MEMORY = re.compile(r"Node ([0-9]+) MemTotal:\s+([0-9]{1,15}) kB", re.ASCII)
_NODE_FILES = ("cpulist", "cpumap", "distance")
_GPU_VENDORS = ("0x10de", "0x1002")
_MELLANOX = "0x15b3"


def parse_sysfs(text: str) -> tuple[SystemFiles, tuple[str, ...]]:
    """Read the whole listing: (facts, the warning that names the first damaged line).

    Raises:
        CheckFailedError: it lists no files of /sys.
    """
    lines, warnings = read_lines(text)
    files: dict[str, File] = {}
    for line in lines:
        match = _FILE.fullmatch(line.text) or _FILE_OF_GREP.fullmatch(line.text)
        if not match or line.text.count("/sys/") > 1:
            warnings.append(f"line {line.number}: no file of /sys and what it holds: {line.text[:60]!r}")
            continue
        value = (match[2] or "").replace("\\n", " ").replace("\0", "").strip()
        if match[1] in files:
            warnings.append(f"line {line.number}: {match[1]} is also in line {files[match[1]].line}")
            value = value if files[match[1]].value == value else "?"
        files[match[1]] = File(line.number, value)
    if not files:
        raise refusal("grep -r . /sys", lines)
    nodes = _nodes(files, warnings)
    facts = SystemFiles(nodes, read_pci(files, nodes, warnings), read_infiniband(files, warnings))
    return facts, first_damaged(warnings)


def _nodes(files: Mapping[str, File], warnings: list[str]) -> dict[int, NumaNode] | None:
    found: defaultdict[int, dict[str, File]] = defaultdict(dict)
    for path, file in files.items():
        if match := _NODE.fullmatch(path):
            found[int(match[1])][match[2]] = file
        elif "/sys/devices/system/node/node" in path:
            warnings.append(f"line {file.line}: no file that a NUMA node has: {path}")
    _compare_online(files, sorted(found), warnings)
    if not found:
        return None
    expected = {name for parts in found.values() for name in parts} | set(_NODE_FILES)
    rows: dict[int, Row] = {}
    nodes: dict[int, NumaNode] = {}
    for number, parts in sorted(found.items()):
        at = min(file.line for file in parts.values())
        if missing := sorted(expected - parts.keys()):
            warnings.append(f"line {at}: node {number} has no file {' and no file '.join(missing)}")
        if "distance" in parts and re.fullmatch(r"[0-9]{1,4}( [0-9]{1,4})*", parts["distance"].value):
            rows[number] = (parts["distance"].line, tuple(int(word) for word in parts["distance"].value.split()))
        nodes[number] = _node(number, parts, at, warnings)
    matrix = read_distances(sorted(found), rows, min(file.line for file in found[min(found)].values()), warnings)
    distances = dict(zip(sorted(found), matrix, strict=True))
    return {number: node.with_distances(distances[number]) for number, node in nodes.items()}


def _node(number: int, parts: Mapping[str, File], at: int, warnings: list[str]) -> NumaNode:
    listed = read_cpu_list(parts["cpulist"].value) if "cpulist" in parts else None
    masked = read_cpu_mask(parts["cpumap"].value) if "cpumap" in parts else None
    for name, read in (("cpulist", listed), ("cpumap", masked)):
        if name in parts and read is None:
            warnings.append(f"line {parts[name].line}: {name} of node {number} holds {parts[name].value[:60]!r}")
    agree = listed is None or masked is None or listed == masked
    if not agree:
        warnings.append(f"line {at}: list and mask of node {number} name other processors; neither is believed")
    memory = _MEMORY.fullmatch(parts["meminfo"].value) if "meminfo" in parts else None
    if "meminfo" in parts and (memory is None or int(memory[1]) != number):
        warnings.append(
            f"line {parts['meminfo'].line}: not the memory of node {number}: {parts['meminfo'].value[:60]!r}"
        )
        memory = None
    return NumaNode(
        cpus=listed if agree else None,
        cpu_list=parts["cpulist"].value if listed is not None and agree else None,
        cpu_mask=parts["cpumap"].value if masked is not None and agree else None,
        distances=None,
        memory_kib=int(memory[2]) if memory else None,
    )


def _compare_online(files: Mapping[str, File], numbers: list[int], warnings: list[str]) -> None:
    online = files.get("/sys/devices/system/node/online")
    if online and read_cpu_list(online.value) != tuple(numbers):
        warnings.append(f"line {online.line}: nodes {online.value[:60]} are online, but files of {cpu_list(numbers)}")
    if numbers and not online and "/sys/devices/system/cpu/online" in files:
        warnings.append(
            f"line {max(file.line for file in files.values())}: /sys/devices/system/node/online is not listed"
        )


def answer_sysfs(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it lists no files of /sys.
    """
    facts, warnings = parse_sysfs(text)
    nodes, devices = facts.nodes, facts.pci_devices if not warnings else None
    gpus = [
        d.address
        for d in devices or ()
        if d.class_code and d.class_code.startswith("0x03") and d.vendor in _GPU_VENDORS
    ]
    return {
        "numa_nodes": None if nodes is None or warnings else len(nodes),
        "nodes": None if nodes is None else {str(number): _node_entry(node) for number, node in nodes.items()},
        "pci_devices": None if devices is None else len(devices),
        "gpus": None if devices is None else gpus,
        "mellanox": None if devices is None else [device.address for device in devices if device.vendor == _MELLANOX],
        "numa_node_minus_one": None if devices is None else sum(device.numa_node == -1 for device in devices),
    }, warnings


def _node_entry(node: NumaNode) -> dict[str, Any]:
    known = node.distances is not None and None not in node.distances
    return {
        "cpulist": node.cpu_list,
        "cpumap": node.cpu_mask,
        "distance": " ".join(map(str, node.distances or ())) if known else None,
    }
