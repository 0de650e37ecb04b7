"""Read a listing of files below /sys, with `path: value` or `path -> target` per line: NUMA nodes, PCI and InfiniBand.

`grep -r . /sys/devices/system/node` prints such lines. Linux reports CPUs twice, as a list and as a mask; if the two
differ, the CPUs are unknown.
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
    """Return the PCI devices in the order of their first lines; None if the listing has no file below /sys/devices."""
    found: defaultdict[str, dict[str, File]] = defaultdict(dict)
    for path, file in files.items():
        if match := _PCI.fullmatch(path):
            form = _FORMS[match[2]]
            if form.fullmatch(file.value):
                found[match[1]][match[2]] = file
            else:
                warnings.append(f"line {file.line}: invalid {match[2]} of {match[1]}: {file.value[:60]!r}")
                found[match[1]].setdefault("", file)
    if not found:
        return () if any(path.startswith("/sys/devices/") for path in files) else None
    expected = {name for name in _FORMS if sum(name in parts for parts in found.values()) >= len(found) / 2}
    for address, parts in found.items():
        if missing := sorted(expected - parts.keys()):
            at = min(file.line for file in parts.values())
            warnings.append(f"line {at}: files of PCI device {address} not found: {', '.join(missing)}")
    return tuple(_device(address, parts, nodes, warnings) for address, parts in found.items())


def _device(address: str, parts: Mapping[str, File], nodes: Collection[int] | None, warnings: list[str]) -> PciDevice:
    listed = read_cpu_list(parts["local_cpulist"].value) if "local_cpulist" in parts else None
    masked = read_cpu_mask(parts["local_cpus"].value) if "local_cpus" in parts else None
    if "local_cpulist" in parts and "local_cpus" in parts and listed != masked:
        warnings.append(f"line {parts['local_cpus'].line}: the CPU list and the CPU mask of {address} differ")
        listed = None
    node = int(parts["numa_node"].value) if "numa_node" in parts else None
    if node is not None and node >= 0 and nodes is not None and node not in nodes:
        warnings.append(f"line {parts['numa_node'].line}: {address} is on NUMA node {node}, which is not listed")
        node = None

    def value(name: str) -> str | None:
        return parts[name].value if name in parts else None

    return PciDevice(address, value("class"), value("vendor"), value("device"), node, listed)


def read_infiniband(files: Mapping[str, File], warnings: list[str]) -> tuple[InfinibandDevice, ...]:
    """Return the devices below /sys/class/infiniband in the order of their first lines."""
    found: defaultdict[str, dict[int, dict[str, File]]] = defaultdict(dict)
    for path, file in files.items():
        if path.startswith("/sys/class/infiniband/") and file.value:
            match = _INFINIBAND.fullmatch(path)
            if match is None:
                warnings.append(f"line {file.line}: unexpected file of an InfiniBand device: {path}")
                continue
            found[match[1]].setdefault(int(match[2] or 0), {})[match[3]] = file
    shapes = [frozenset((port, name) for port, parts in device.items() for name in parts) for device in found.values()]
    usual = max(shapes, key=shapes.count, default=frozenset())
    devices = []
    for (name, ports), shape in zip(found.items(), shapes, strict=True):
        at = min(file.line for parts in ports.values() for file in parts.values())
        if missing := sorted(f"{port}/{file}" for port, file in usual - shape):
            warnings.append(f"line {at}: {name} lacks files that other devices have: {', '.join(missing)}")
        read = tuple(_port(name, number, parts, warnings) for number, parts in ports.items() if number)
        devices.append(InfinibandDevice(name, read))
    return tuple(devices)


def _port(name: str, number: int, parts: Mapping[str, File], warnings: list[str]) -> InfinibandPort:
    at = min(file.line for file in parts.values())
    for file in _PORT_FILES:
        if file not in parts:
            warnings.append(f"line {at}: file {file} of port {number} of {name} not found")
    rate = _RATE.fullmatch(parts["rate"].value) if "rate" in parts else None
    if "rate" in parts and rate is None:
        warnings.append(f"line {parts['rate'].line}: expected the rate of a port, got {parts['rate'].value[:60]!r}")
    words = {}
    for key in ("state", "phys_state"):  # values such as "4: ACTIVE"
        match = re.fullmatch(r"[0-9]{1,2}: ([A-Za-z_<> ]+)", parts[key].value) if key in parts else None
        words[key] = match[1] if match else None
        if key in parts and match is None:
            warnings.append(f"line {parts[key].line}: expected the state of a port, got {parts[key].value[:60]!r}")
    layer = parts["link_layer"].value if "link_layer" in parts else None
    if layer not in (None, "InfiniBand", "Ethernet"):
        warnings.append(f"line {parts['link_layer'].line}: expected the link layer of a port, got {layer[:60]!r}")
        layer = None
    return InfinibandPort(number, words["state"], words["phys_state"], float(rate[1]) if rate else None, layer)


class File(NamedTuple):
    """The value of a file, and the line of the listing that contains it."""

    line: int
    value: str


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; `cpus` is empty for a node with only memory."""

    cpus: tuple[int, ...] | None
    cpu_list: str | None
    cpu_mask: str | None
    distances: tuple[int | None, ...] | None
    memory_kib: int | None

    def with_distances(self, distances: tuple[int | None, ...]) -> NumaNode:
        """Return this node with its distances to all nodes, in the order of their numbers."""
        return replace(self, distances=distances)


@dataclass(frozen=True)
class PciDevice:
    """One PCI device. `numa_node` is -1 if the firmware does not report it."""

    address: str
    class_code: str | None
    vendor: str | None
    device: str | None
    numa_node: int | None
    local_cpus: tuple[int, ...] | None


@dataclass(frozen=True)
class InfinibandPort:
    """One port of a device below /sys/class/infiniband, in the terms of the kernel."""

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
    """The facts in a listing; `nodes` and `pci_devices` are None if the listing has no files of this kind."""

    nodes: Mapping[int, NumaNode] | None
    pci_devices: tuple[PciDevice, ...] | None
    infiniband: tuple[InfinibandDevice, ...]


KEYS = {
    "numa_nodes": "number of NUMA nodes; like all counts and lists below, null if none is listed or a line is damaged",
    "nodes": "each node by its number: cpulist, its CPUs as a list with ranges; cpumap, the same as a mask; "
    "distance, the distances to all nodes in the order of their numbers, 10 to itself",
    "pci_devices": "number of PCI devices, including bridges",
    "gpus": "PCI addresses of GPUs: display devices from NVIDIA and AMD",
    "mellanox": "PCI addresses of Mellanox devices",
    "numa_node_minus_one": "number of PCI devices with NUMA node -1, which the firmware does not report",
}
_FILE = re.compile(r"(/sys/\S*?[^\s:])(?::(?: (.*))?| -> (.+))")
_FILE_OF_GREP = re.compile(r"(/sys/\S*?/[A-Za-z0-9_]+):([^/]*)()")  # PCI addresses contain colons, too
_NODE = re.compile(r"/sys/devices/system/node/node([0-9]{1,5})/(cpulist|cpumap|distance|meminfo)")
_MEMORY = re.compile(r"Node ([0-9]+) MemTotal:\s+([0-9]{1,15}) kB", re.ASCII)
_NODE_FILES = ("cpulist", "cpumap", "distance")
_GPU_VENDORS = ("0x10de", "0x1002")
_MELLANOX = "0x15b3"


def parse_sysfs(text: str) -> tuple[SystemFiles, tuple[str, ...]]:
    """Return (facts, the warning that names the first damaged line) for a listing.

    Raises:
        CheckFailedError: `text` does not list files of /sys.
    """
    lines, warnings = read_lines(text)
    files: dict[str, File] = {}
    for line in lines:
        match = _FILE.fullmatch(line.text) or _FILE_OF_GREP.fullmatch(line.text)
        if not match or line.text.count("/sys/") > 1:
            warnings.append(f"line {line.number}: expected a file of /sys and its value, got {line.text[:60]!r}")
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
    """Return the facts in files, given by path; add a warning for each damaged file."""
    nodes = _nodes(files, warnings)
    return SystemFiles(nodes, read_pci(files, nodes, warnings), read_infiniband(files, warnings))


def _nodes(files: Mapping[str, File], warnings: list[str]) -> dict[int, NumaNode] | None:
    found: defaultdict[int, dict[str, File]] = defaultdict(dict)
    for path, file in files.items():
        if match := _NODE.fullmatch(path):
            found[int(match[1])][match[2]] = file
        elif "/sys/devices/system/node/node" in path:
            warnings.append(f"line {file.line}: unexpected file of a NUMA node: {path}")
    _compare_online(files, sorted(found), warnings)
    if not found:
        return None
    expected = {name for parts in found.values() for name in parts} | set(_NODE_FILES)
    rows: dict[int, Row] = {}
    nodes: dict[int, NumaNode] = {}
    for number, parts in sorted(found.items()):
        at = min(file.line for file in parts.values())
        if missing := sorted(expected - parts.keys()):
            warnings.append(f"line {at}: files of node {number} not found: {', '.join(missing)}")
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
            warnings.append(f"line {parts[name].line}: invalid {name} of node {number}: {parts[name].value[:60]!r}")
    agree = listed is None or masked is None or listed == masked
    if not agree:
        warnings.append(f"line {at}: the CPU list and the CPU mask of node {number} differ; both are ignored")
    memory = _MEMORY.fullmatch(parts["meminfo"].value) if "meminfo" in parts else None
    if "meminfo" in parts and (memory is None or int(memory[1]) != number):
        warnings.append(
            f"line {parts['meminfo'].line}: expected the memory of node {number}, got {parts['meminfo'].value[:60]!r}"
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
    """Return (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: `text` does not list files of /sys.
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
