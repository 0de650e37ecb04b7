"""Read RDMA adapters and their ports from /sys/class/infiniband, for the facts and for the settings of the fabric.

The reader of /sys listings parses the files, so that facts and listings pass the same consistency checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from toolkit.topology.readers.sysfs_devices import read_infiniband
from toolkit.topology.readers.sysfs_facts import File, InfinibandDevice, InfinibandPort
from toolkit.topology.sources.kernel_files import SYSTEM_ROOT, names_in, read_file

__all__ = ["is_active", "measured_rate", "read_adapters", "state_of"]

_FOLDER = "class/infiniband"
_DEVICE_FILES = ("hca_type", "fw_ver")
_PORT_FILES = ("state", "phys_state", "rate", "link_layer")
_STATES = {"INIT": "Initializing", "ACTIVE_DEFER": "Active"}  # the kernel's terms, mapped to those of ibstat
_ACTIVE = "Active"


def read_adapters(root: Path = SYSTEM_ROOT) -> tuple[tuple[InfinibandDevice, ...] | None, tuple[str, ...]]:
    """(the adapters that the kernel lists, or None without such a list; warnings about damage).

    An adapter or a port with unreadable files is in the list, and its facts are unknown.
    """
    if not (root / _FOLDER).is_dir():
        return None, ()
    warnings: list[str] = []
    names = [name for name in names_in(root / _FOLDER) if (root / _FOLDER / name).is_dir()]
    files = {path: File(0, text) for name in names for path, text in _files_of(root, name)}
    parsed = {device.name: device for device in read_infiniband(files, warnings)}
    devices = (parsed.get(name, InfinibandDevice(name, None, None, None, ())) for name in names)
    return tuple(_with_all_ports(root, device) for device in devices), tuple(warnings)


def state_of(port: InfinibandPort) -> str | None:
    """The logical state, in the terms of ibstat."""
    return None if port.state is None else _STATES.get(port.state, port.state.capitalize())


def is_active(port: InfinibandPort) -> bool | None:
    """Whether the port carries traffic; None if the kernel does not report its state."""
    return None if port.state is None else state_of(port) == _ACTIVE


def measured_rate(port: InfinibandPort) -> float | None:
    """The rate of the port in Gbit/s; None unless its link is up, since only then the kernel reports the real rate."""
    return port.rate_gbit_per_s if is_active(port) and port.physical_state in ("LinkUp", None) else None


def _files_of(root: Path, name: str) -> Iterable[tuple[str, str]]:
    paths = [*_DEVICE_FILES]
    for port in names_in(root / _FOLDER / name / "ports"):
        paths += [f"ports/{port}/{file}" for file in _PORT_FILES]
    for path in paths:
        if value := read_file(root / _FOLDER / name / path):
            yield f"/sys/{_FOLDER}/{name}/{path}", value


def _with_all_ports(root: Path, device: InfinibandDevice) -> InfinibandDevice:
    numbers = [int(name) for name in names_in(root / _FOLDER / device.name / "ports") if name.isdecimal()]
    parsed = {port.number: port for port in device.ports}
    return replace(
        device, ports=tuple(parsed.get(number, InfinibandPort(number, None, None, None, None)) for number in numbers)
    )
