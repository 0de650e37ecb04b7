"""Read a listing of files below /sys, one `path: value` or `path -> target` a line: NUMA nodes, PCI and InfiniBand.

`grep -r . /sys/devices/system/node` prints such lines. Linux states the processors twice, as a list and as a mask: if
the two differ, they are unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from toolkit.topology.readers.distances import Row, read_distances
from toolkit.topology.readers.lines import first_damaged, read_lines, refusal
from toolkit.world.cpu_lists import cpu_list, read_cpu_list, read_cpu_mask

_PCI = re.compile(
    r"/sys/(?:devices|bus/pci)/(?:.*/)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/"
    r"(class|device|vendor|local_cpulist|local_cpus|numa_node)"
)
_FORMS = {
    "class": re.compile("0x[0-9a-f]{6}"), "vendor": re.compile("0x[0-9a-f]{4}"), "device": re.compile("0x[0-9a-f]{4}"),
    "numa_node": re.compile("-1|[0-9]{1,5}"), "local_cpulist": re.compile("[0-9,-]*"), "local_cpus": re.compile("[0-9a-f,]+"),
}  # fmt: skip
_INFINIBAND = re.compile(r"/sys/class/infiniband/([^/]+)/(?:ports/([0-9]{1,3})/)?([a-z_0-9]+)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec(?: \([0-9]+X(?: [A-Z0-9]+)?\))?")
_PORT_FILES = ("state", "phys_state", "rate", "link_layer")


def read_pci(
    files: Mapping[str, File], nodes: Collection[int] | None, warnings: list[str]
) -> tuple[PciDevice, ...] | None:
    """The PCI devices in the order of their first line; None where nothing below /sys/devices is listed."""
    found: defaultdict[str, dict[str, File]] = defaultdict(dict)
    for path, file in files.items():
        if match := _PCI.fullmatch(path):
            form = _FORMS[match[2]]
            if form.fullmatch(file.value):
                found[match[1]][match[2]] = file
            else:
                warnings.append(f"line {file.line}: {match[2]} of {match[1]} holds {file.value[:60]!r}")
                found[match[1]].setdefault("", file)
    if not found:
        return () if any(path.startswith("/sys/devices/") for path in files) else None
    expected = {name for name in _FORMS if sum(name in parts for parts in found.values()) >= len(found) / 2}
    for address, parts in found.items():
        if missing := sorted(expected - parts.keys()):
            at = min(file.line for file in parts.values())
            warnings.append(f"line {at}: PCI device {address} has no file {' and no file '.join(missing)}")
    return tuple(_device(address, parts, nodes, warnings) for address, parts in found.items())


def _device(address: str, parts: Mapping[str, File], nodes: Collection[int] | None, warnings: list[str]) -> PciDevice:
    listed = read_cpu_list(parts["local_cpulist"].value) if "local_cpulist" in parts else None
    masked = read_cpu_mask(parts["local_cpus"].value) if "local_cpus" in parts else None
    if "local_cpulist" in parts and "local_cpus" in parts and listed != masked:
        warnings.append(f"line {parts['local_cpus'].line}: list and mask of {address} name other processors")
        listed = None
    node = int(parts["numa_node"].value) if "numa_node" in parts else None
    if node is not None and node >= 0 and nodes is not None and node not in nodes:
        warnings.append(f"line {parts['numa_node'].line}: {address} is next to node {node}, which is not listed")
        node = None

    def value(name: str) -> str | None:
        return parts[name].value if name in parts else None

    return PciDevice(address, value("class"), value("vendor"), value("device"), node, listed)


def read_infiniband(files: Mapping[str, File], warnings: list[str]) -> tuple[InfinibandDevice, ...]:
    """The devices below /sys/class/infiniband in the order of their first line."""
    found: defaultdict[str, dict[int, dict[str, File]]] = defaultdict(dict)
    for path, file in files.items():
        if path.startswith("/sys/class/infiniband/") and file.value:
            match = _INFINIBAND.fullmatch(path)
            if match is None:
                warnings.append(f"line {file.line}: no file that an InfiniBand device has: {path}")
                continue
            found[match[1]].setdefault(int(match[2] or 0), {})[match[3]] = file
    shapes = [frozenset((port, name) for port, parts in device.items() for name in parts) for device in found.values()]
    usual = max(shapes, key=shapes.count, default=frozenset())
    devices = []
    for (name, ports), shape in zip(found.items(), shapes, strict=True):
        at = min(file.line for parts in ports.values() for file in parts.values())
        if missing := sorted(f"{port}/{file}" for port, file in usual - shape):
            warnings.append(f"line {at}: {name} has not the files that others have: {', '.join(missing)}")
        read = tuple(_port(name, number, parts, warnings) for number, parts in ports.items() if number)
        devices.append(InfinibandDevice(name, read))
    return tuple(devices)


def _port(name: str, number: int, parts: Mapping[str, File], warnings: list[str]) -> InfinibandPort:
    at = min(file.line for file in parts.values())
    for file in _PORT_FILES:
        if file not in parts:
            warnings.append(f"line {at}: port {number} of {name} has no file {file}")
    rate = _RATE.fullmatch(parts["rate"].value) if "rate" in parts else None
    if "rate" in parts and rate is None:
        warnings.append(f"line {parts['rate'].line}: no rate of a port: {parts['rate'].value[:60]!r}")
    words = {}
    for key in ("state", "phys_state"):  # "4: ACTIVE"
        match = re.fullmatch(r"[0-9]{1,2}: ([A-Za-z_<> ]+)", parts[key].value) if key in parts else None
        words[key] = match[1] if match else None
        if key in parts and match is None:
            warnings.append(f"line {parts[key].line}: no state of a port: {parts[key].value[:60]!r}")
    layer = parts["link_layer"].value if "link_layer" in parts else None
    if layer not in (None, "InfiniBand", "Ethernet"):
        warnings.append(f"line {parts['link_layer'].line}: no link layer of a port: {layer[:60]!r}")
        layer = None
    return InfinibandPort(number, words["state"], words["phys_state"], float(rate[1]) if rate else None, layer)


class File(NamedTuple):
    """What a file holds, and the line that says so."""

    line: int
    value: str


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; `cpus` is empty for a node of memory alone."""

    cpus: tuple[int, ...] | None
    cpu_list: str | None
    cpu_mask: str | None
    distances: tuple[int | None, ...] | None
    memory_kib: int | None

    def with_distances(self, distances: tuple[int | None, ...]) -> NumaNode:
        """The same node, with its distances to each node in the order of their numbers."""
        return replace(self, distances=distances)


@dataclass(frozen=True)
class PciDevice:
    """One PCI device. `numa_node` is -1 where the firmware does not tell it."""

    address: str
    class_code: str | None
    vendor: str | None
    device: str | None
    numa_node: int | None
    local_cpus: tuple[int, ...] | None


@dataclass(frozen=True)
class InfinibandPort:
    """One port of a device below /sys/class/infiniband, in the kernel's words."""

    number: int
    state: str | None
    physical_state: str | None
    rate_gbit_per_s: float | None
    link_layer: str | None


@dataclass(frozen=True)
class InfinibandDevice:
    """One device below /sys/class/infiniband."""

    name: str
    ports: tuple[InfinibandPort, ...]


@dataclass(frozen=True)
class SystemFiles:
    """None where no file of the sort is listed."""

    nodes: Mapping[int, NumaNode] | None
    pci_devices: tuple[PciDevice, ...] | None
    infiniband: tuple[InfinibandDevice, ...]


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
    return facts_of_files(files, warnings), first_damaged(warnings)


def facts_of_files(files: Mapping[str, File], warnings: list[str]) -> SystemFiles:
    """The facts in the values of files by path; adds the damage to the warnings."""
    nodes = _nodes(files, warnings)
    return SystemFiles(nodes, read_pci(files, nodes, warnings), read_infiniband(files, warnings))


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
