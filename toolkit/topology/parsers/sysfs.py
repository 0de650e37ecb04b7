"""Read a listing of files below /sys, one `path: value` or `path -> target` a line: NUMA nodes, PCI and InfiniBand.

`grep -r . /sys/devices/system/node` prints such lines. Linux says most of it twice, as a list and as a mask, for each
node and for all: what does not agree is named.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.topology.parsers.cpu_lists import cpu_list, read_cpu_list, read_cpu_mask
from toolkit.topology.parsers.distances import Row, read_distances
from toolkit.topology.parsers.host_lines import read_lines
from toolkit.topology.parsers.sysfs_devices import read_infiniband, read_pci
from toolkit.topology.parsers.sysfs_facts import File, NumaNode, SystemFiles

KEYS = {
    "numa_nodes": "how many NUMA nodes; null where no file of them is listed, as for all that follows",
    "nodes": "each of them by its number: cpulist, its processors as a list with ranges; cpumap, the same as a mask; "
    "distance, to each node in their order, 10 to itself",
    "pci_devices": "how many PCI devices, bridges too; null where nothing below /sys/devices is listed",
    "gpus": "the PCI addresses of GPUs: display devices of NVIDIA and AMD",
    "mellanox": "the PCI addresses of devices of Mellanox",
    "numa_node_minus_one": "how many PCI devices say -1, so that nobody knows next to which NUMA node they are",
}
_FILE = re.compile(r"(/sys/\S*?[^\s:])(?::(?: (.*))?| -> (.+))")
_FILE_OF_GREP = re.compile(r"(/sys/\S*?/[A-Za-z0-9_]+):([^/]*)()")  # without a blank; addresses have colons, too
_NODE = re.compile(r"/sys/devices/system/node/node([0-9]{1,5})/(cpulist|cpumap|distance|meminfo)")
_CPU = re.compile(r"/sys/devices/system/cpu/cpu([0-9]{1,6})/topology/([a-z_]+)")
_MEMORY = re.compile(r"Node ([0-9]+) MemTotal:\s+([0-9]{1,15}) kB", re.ASCII)
_NODE_FILES = ("cpulist", "cpumap", "distance")
_GPU_VENDORS = ("0x10de", "0x1002")
_MELLANOX = "0x15b3"


def parse_sysfs(text: str) -> tuple[SystemFiles, tuple[str, ...]]:
    """Read the whole listing: (facts, warnings that name the damaged lines).

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
            warnings.append(f"line {line.number}: {match[1]} stands in line {files[match[1]].line}, too")
            value = value if files[match[1]].value == value else "?"
        files[match[1]] = File(line.number, value)
    if not files:
        said = f": {lines[0].text[:60]!r}" if lines else ""
        raise CheckFailedError(f"no listing of files of /sys{said}", where=f"line {lines[0].number if lines else 1}")
    nodes = _nodes(files, warnings)
    _compare_processors(files, nodes or {}, warnings)
    return SystemFiles(nodes, read_pci(files, nodes, warnings), read_infiniband(files, warnings)), tuple(warnings)


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


def _compare_processors(files: Mapping[str, File], nodes: Mapping[int, NumaNode], warnings: list[str]) -> None:
    """Name processors that have not the files of the others, or are not those of the nodes."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for path, file in files.items():
        if match := _CPU.fullmatch(path):
            found[int(match[1])].add(match[2])
            if match[2].endswith("_list") and int(match[1]) not in (read_cpu_list(file.value) or ()):
                warnings.append(f"line {file.line}: {path} has not processor {match[1]} in it: {file.value[:60]!r}")
            elif match[2].endswith("_id") and not re.fullmatch("-?[0-9]{1,6}", file.value):
                warnings.append(f"line {file.line}: {path} is no number: {file.value[:60]!r}")
    counts = Counter(name for names in found.values() for name in names)
    expected = {name for name, count in counts.items() if count > len(found) / 2}
    last = max(file.line for file in files.values())
    for cpu, names in found.items():
        if names != expected:
            warnings.append(f"line {last}: processor {cpu} has other files than others: {sorted(names ^ expected)}")
    online = files.get("/sys/devices/system/cpu/online")
    listed = read_cpu_list(online.value) if online else None
    known = [node.cpus for node in nodes.values()]
    if online and found and (listed is None or not set(listed) <= set(found)):
        warnings.append(f"line {online.line}: {online.value[:60]!r} are online, but files of {cpu_list(found)}")
    if found and not online:
        warnings.append(f"line {last}: /sys/devices/system/cpu/online is not listed")
    if listed and known and None not in known and sorted(c for cpus in known for c in cpus or ()) != list(listed):
        warnings.append(f"line {last}: the processors of the NUMA nodes are not those that are online")


def answer_sysfs(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of `KEYS` and warnings.

    Raises:
        CheckFailedError: it lists no files of /sys.
    """
    facts, warnings = parse_sysfs(text)
    nodes, devices = facts.nodes, facts.pci_devices
    gpus = [
        d.address
        for d in devices or ()
        if d.class_code and d.class_code.startswith("0x03") and d.vendor in _GPU_VENDORS
    ]
    return {
        "numa_nodes": None if nodes is None else len(nodes),
        "nodes": None
        if nodes is None
        else {
            str(number): {
                "cpulist": node.cpu_list,
                "cpumap": node.cpu_mask,
                "distance": None
                if node.distances is None or None in node.distances
                else " ".join(str(distance) for distance in node.distances),
            }
            for number, node in nodes.items()
        },
        "pci_devices": None if devices is None else len(devices),
        "gpus": None if devices is None else gpus,
        "mellanox": None if devices is None else [device.address for device in devices if device.vendor == _MELLANOX],
        "numa_node_minus_one": None if devices is None else sum(device.numa_node == -1 for device in devices),
    }, warnings
