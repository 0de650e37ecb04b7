"""Claim CPUs, NUMA nodes, PCI devices and NICs from files below /sys on this machine.

readers/sysfs.py parses the files, so that they pass the same consistency checks as listings of /sys.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.topology.claims import Answer
from toolkit.topology.readers.sysfs import File, InfinibandDevice, PciDevice, facts_of_files
from toolkit.topology.sources.kernel_files import (
    SYSTEM_ROOT,
    is_active,
    measured_rate,
    names_in,
    read_adapters,
    read_file,
    state_of,
)
from toolkit.world.cpu_lists import cpu_list, read_cpu_list

__all__ = ["ask_system_files", "count_gpus", "pci_link"]

SOURCE = "/sys"
_OF_GPUS = (("GPU", None, "numa_node"), ("GPU", None, "cpus"))
COVERS = (("sockets",), ("cpus",), ("numa_nodes",), ("numa",), *_OF_GPUS, ("nics",), ("nic",), ("link",))
_NODE_FILES = ("cpulist", "cpumap", "distance", "meminfo")
_PCI_FILES = ("numa_node", "local_cpulist")
_NVIDIA = "0x10de"


def ask_system_files(gpu_buses: Mapping[int, str], root: Path = SYSTEM_ROOT) -> Answer:
    """Return the claims in /sys. `gpu_buses` contains the PCI address of each GPU by its NVML index."""
    answer = Answer(SOURCE, "direct", COVERS)
    adapters, damage = read_adapters(root)
    nic_buses = {nic.name: bus for nic in adapters or () if (bus := _address(_nic_folder(root, nic.name) / "device"))}
    files = dict(_listed(root, {*gpu_buses.values(), *nic_buses.values()}))
    if not files and not adapters:
        answer.miss("/sys: lists no NUMA node and no device")
        return answer
    warnings: list[str] = []
    facts = facts_of_files(files, warnings)
    answer.warnings += [f"/sys: {re.sub('^line [0-9]+: ', '', warning)}" for warning in (*warnings, *damage)]
    _claim_processors(root, answer)
    for number, node in (facts.nodes or {}).items():
        answer.say(True, "numa", number)
        answer.say(None if node.cpus is None else cpu_list(node.cpus), "numa", number, "cpus")
        answer.say(None if node.memory_kib is None else node.memory_kib // 1024, "numa", number, "memory_mib")
        _claim_socket(root, number, node.cpus or (), answer)
    devices = {device.address: device for device in facts.pci_devices or ()}
    for index, bus in gpu_buses.items():
        _claim_near(devices.get(bus), answer, ("GPU", index))
    answer.say(True, "nics")
    for nic in adapters or ():
        _claim_nic(root, nic, answer)
        answer.say(nic_buses.get(nic.name), "nic", nic.name, "bus")
        _claim_near(devices.get(nic_buses.get(nic.name, "")), answer, ("nic", nic.name))
    _claim_paths(root, gpu_buses, nic_buses, answer)
    return answer


def count_gpus(root: Path = SYSTEM_ROOT) -> int:
    """Return the number of NVIDIA display devices on the PCI bus, including those that this job cannot use."""
    devices = [root / "bus/pci/devices" / address for address in names_in(root / "bus/pci/devices")]
    displays = [device for device in devices if (read_file(device / "class") or "").startswith("0x03")]
    return sum(read_file(device / "vendor") == _NVIDIA for device in displays)


def _address(link: Path) -> str | None:
    """Return the PCI address that a symbolic link in /sys points to; None for a virtual device such as soft RoCE."""
    name = Path(os.path.realpath(link)).name
    return name if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None


def _nic_folder(root: Path, name: str) -> Path:
    return root / "class/infiniband" / name


def _listed(root: Path, addresses: Iterable[str]) -> Iterable[tuple[str, File]]:
    """Yield the readable files of NUMA nodes and of the given PCI devices, as a listing would contain them."""
    nodes = [name for name in names_in(root / "devices/system/node") if re.fullmatch("node[0-9]+", name)]
    paths = [f"devices/system/node/{name}/{file}" for name in nodes for file in _NODE_FILES]
    paths += ["devices/system/node/online"]
    paths += [f"bus/pci/devices/{address}/{file}" for address in sorted(addresses) for file in _PCI_FILES]
    for path in paths:
        value = read_file(root / path)
        if value is not None and path.endswith("meminfo"):
            value = next((" ".join(line.split()) for line in value.splitlines() if "MemTotal" in line), "")
        if value is not None:
            yield f"/sys/{path}", File(0, value)


def _claim_processors(root: Path, answer: Answer) -> None:
    online = read_file(root / "devices/system/cpu/online")
    cpus = read_cpu_list(online) if online else None
    if cpus is None:
        answer.miss("/sys does not list the online processors", "cpus")
        answer.miss("/sys does not list the online processors", "sockets")
        return
    answer.say(cpu_list(cpus), "cpus")
    sockets = {_socket(root, cpu) for cpu in cpus}
    if None in sockets:
        answer.miss("/sys does not report the socket of each processor", "sockets")
    else:
        answer.say(len(sockets), "sockets")


def _socket(root: Path, cpu: int) -> int | None:
    package = read_file(root / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")
    return int(package) if package and package.isdecimal() else None


def _claim_socket(root: Path, number: int, cpus: Iterable[int], answer: Answer) -> None:
    sockets = {_socket(root, cpu) for cpu in cpus}
    if len(sockets) == 1:
        answer.say(sockets.pop(), "numa", number, "socket")
    if ("numa", number, "socket") not in answer.claims:
        reason = "spans several sockets" if sockets else "has no processors, so its socket is unknown"
        answer.miss(f"/sys: NUMA node {number} {reason}", "numa", number, "socket")


def _claim_near(device: PciDevice | None, answer: Answer, about: tuple[str, int | str]) -> None:
    if device is None:
        answer.miss("/sys does not list its PCI device", *about)
        return
    if device.numa_node == -1:
        answer.miss("/sys: the firmware does not report the NUMA node", *about, "numa_node")
    else:
        answer.say(device.numa_node, *about, "numa_node")
    answer.say(cpu_list(device.local_cpus) if device.local_cpus else None, *about, "cpus")


def _claim_nic(root: Path, nic: InfinibandDevice, answer: Answer) -> None:
    about = ("nic", nic.name)
    folder = _nic_folder(root, nic.name)
    answer.say(True, *about)
    answer.say(read_file(folder / "node_guid"), *about, "guid")
    interfaces = names_in(folder / "device/net")
    answer.say(",".join(interfaces) or None, *about, "net_device")
    if not interfaces:
        answer.miss("/sys lists no network interface of this adapter", *about, "net_device")
    for port in nic.ports:
        of_port = (*about, "port", port.number)
        answer.miss("/sys does not report it", *of_port)
        answer.say(state_of(port), *of_port, "state")
        answer.say(port.link_layer, *of_port, "link_layer")
        answer.say(measured_rate(port), *of_port, "rate")
        if is_active(port) is False or port.physical_state not in ("LinkUp", None):
            answer.miss("the port is not active, so its rate is unknown", *of_port, "rate")


def _claim_paths(root: Path, gpu_buses: Mapping[int, str], nic_buses: Mapping[str, str], answer: Answer) -> None:
    """Claim the link between each GPU and NIC, derived from their positions in the PCI tree."""
    devices = root / "bus/pci/devices"
    for index, bus in gpu_buses.items():
        for name, other in nic_buses.items():
            nodes = [answer.claims.get((*about, "numa_node")) for about in (("GPU", index), ("nic", name))]
            is_same_node = None if None in nodes else nodes[0] == nodes[1]
            link = pci_link(os.path.realpath(devices / bus), os.path.realpath(devices / other), is_same_node)
            answer.say(link, "link", f"GPU{index}", name, derived=True)


def pci_link(first_path: str, second_path: str, is_same_node: bool | None) -> str | None:
    """Return the link between two PCI devices, given their folders in /sys, in the terms of nvidia-smi; None if unknown.

    The rules are those of NCCL: PIX crosses one PCIe switch, PXB several, PHB a host bridge; NODE and SYS cross two host
    bridges, on one NUMA node or on two.
    """
    first, second = ([part for part in path.split("/") if ":" in part] for path in (first_path, second_path))
    shared = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
    if not first or not second or not first[0].startswith("pci") or not second[0].startswith("pci"):
        return None
    if shared == 0:
        return None if is_same_node is None else "NODE" if is_same_node else "SYS"
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(first), len(second)) - shared <= 2 else "PXB"
