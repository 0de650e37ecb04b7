"""RDMA adapters and their ports, from the files below /sys/class/infiniband: for facts, and for settings of the fabric.

The files are read by the parser of listings of /sys, so that both hold them against each other in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from toolkit.topology.readers.sysfs_devices import read_infiniband
from toolkit.topology.readers.sysfs_facts import File, InfinibandDevice, InfinibandPort
from toolkit.topology.sources.kernel_files import SYSTEM_ROOT, names_in, read_file

_FOLDER = "class/infiniband"
_DEVICE_FILES = ("hca_type", "fw_ver")
_PORT_FILES = ("state", "phys_state", "rate", "link_layer")
_STATES = {"INIT": "Initializing", "ACTIVE_DEFER": "Active"}  # the kernel's words, in those of ibstat
_ACTIVE = "Active"


def read_adapters(root: Path = SYSTEM_ROOT) -> tuple[tuple[InfinibandDevice, ...] | None, tuple[str, ...]]:
    """(the adapters that the kernel lists, None where it has no such list; warnings of damage).

    An adapter or a port whose files cannot be read is there all the same, and nothing of it is known.
    """
    if not (root / _FOLDER).is_dir():
        return None, ()
    warnings: list[str] = []
    names = [name for name in names_in(root / _FOLDER) if (root / _FOLDER / name).is_dir()]
    files = {path: File(0, text) for name in names for path, text in _files_of(root, name)}
    known = {device.name: device for device in read_infiniband(files, warnings)}
    devices = (known.get(name, InfinibandDevice(name, None, None, None, ())) for name in names)
    return tuple(_with_all_ports(root, device) for device in devices), tuple(warnings)


def state_of(port: InfinibandPort) -> str | None:
    """The logical state, in the words of ibstat."""
    return None if port.state is None else _STATES.get(port.state, port.state.capitalize())


def is_active(port: InfinibandPort) -> bool | None:
    """Whether it carries traffic; None where the kernel does not tell its state."""
    return None if port.state is None else state_of(port) == _ACTIVE


def measured_rate(port: InfinibandPort) -> float | None:
    """Its rate in Gbit/s; None where it is no measurement, since nothing runs at it."""
    return port.rate_gbit_per_s if is_active(port) and port.physical_state in ("LinkUp", None) else None


def _files_of(root: Path, name: str) -> Iterable[tuple[str, str]]:
    places = [*_DEVICE_FILES]
    for port in names_in(root / _FOLDER / name / "ports"):
        places += [f"ports/{port}/{file}" for file in _PORT_FILES]
    for place in places:
        if value := read_file(root / _FOLDER / name / place):
            yield f"/sys/{_FOLDER}/{name}/{place}", value


def _with_all_ports(root: Path, device: InfinibandDevice) -> InfinibandDevice:
    numbers = [int(name) for name in names_in(root / _FOLDER / device.name / "ports") if name.isdecimal()]
    known = {port.number: port for port in device.ports}
    return replace(
        device, ports=tuple(known.get(number, InfinibandPort(number, None, None, None, None)) for number in numbers)
    )
