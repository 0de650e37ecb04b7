"""Read files, folders and RDMA adapters below /sys on this machine.

readers/sysfs.py parses the files of adapters, so that they pass the same consistency checks as listings of /sys.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from toolkit.topology.names import by_numbers
from toolkit.topology.readers.sysfs import File, InfinibandDevice, InfinibandPort, read_infiniband

__all__ = ["SYSTEM_ROOT", "is_active", "measured_rate", "names_in", "read_adapters", "read_file", "state_of"]

SYSTEM_ROOT = Path("/sys")
_FOLDER = "class/infiniband"
_PORT_FILES = ("state", "phys_state", "rate", "link_layer")
_STATES = {"INIT": "Initializing", "ACTIVE_DEFER": "Active"}  # the kernel's terms, mapped to those of ibstat
_ACTIVE = "Active"


def read_file(path: Path) -> str | None:
    """Return the stripped content of a file; None if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # many files of /sys cannot be read while a device is offline
        return None


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, with mlx5_2 before mlx5_10; [] if the folder does not exist."""
    try:
        return sorted((path.name for path in folder.iterdir()), key=by_numbers)
    except OSError:
        return []


def read_adapters(root: Path = SYSTEM_ROOT) -> tuple[tuple[InfinibandDevice, ...] | None, tuple[str, ...]]:
    """Return (the adapters that the kernel lists, or None without such a list, and warnings about invalid files).

    The list includes adapters and ports with unreadable files, whose facts are unknown.
    """
    if not (root / _FOLDER).is_dir():
        return None, ()
    warnings: list[str] = []
    names = [name for name in names_in(root / _FOLDER) if (root / _FOLDER / name).is_dir()]
    files = {path: File(0, text) for name in names for path, text in _files_of(root, name)}
    parsed = {device.name: device for device in read_infiniband(files, warnings)}
    devices = (parsed.get(name, InfinibandDevice(name, ())) for name in names)
    return tuple(_with_all_ports(root, device) for device in devices), tuple(warnings)


def state_of(port: InfinibandPort) -> str | None:
    """Return the logical state of a port in the terms of ibstat."""
    return None if port.state is None else _STATES.get(port.state, port.state.capitalize())


def is_active(port: InfinibandPort) -> bool | None:
    """Return whether a port is active; None if the kernel does not report its state."""
    return None if port.state is None else state_of(port) == _ACTIVE


def measured_rate(port: InfinibandPort) -> float | None:
    """Return the rate of a port in Gbit/s; None unless its link is up, since the kernel then reports a default."""
    return port.rate_gbit_per_s if is_active(port) and port.physical_state in ("LinkUp", None) else None


def _files_of(root: Path, name: str) -> Iterable[tuple[str, str]]:
    for port in names_in(root / _FOLDER / name / "ports"):
        for file in _PORT_FILES:
            path = f"{_FOLDER}/{name}/ports/{port}/{file}"
            if value := read_file(root / path):
                yield f"/sys/{path}", value


def _with_all_ports(root: Path, device: InfinibandDevice) -> InfinibandDevice:
    numbers = [int(name) for name in names_in(root / _FOLDER / device.name / "ports") if name.isdecimal()]
    parsed = {port.number: port for port in device.ports}
    return replace(
        device, ports=tuple(parsed.get(number, InfinibandPort(number, None, None, None, None)) for number in numbers)
    )
