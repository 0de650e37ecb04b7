"""PCI and InfiniBand devices among the files below /sys."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from toolkit.topology.readers.sysfs_facts import File, InfinibandDevice, InfinibandPort, PciDevice
from toolkit.world.cpu_lists import read_cpu_list, read_cpu_mask

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
        own = {key: file.value for key, file in ports.get(0, {}).items()}
        read = tuple(_port(name, number, parts, warnings) for number, parts in ports.items() if number)
        devices.append(InfinibandDevice(name, own.get("hca_type"), own.get("fw_ver"), own.get("board_id"), read))
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
