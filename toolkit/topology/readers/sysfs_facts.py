"""What the files below /sys tell of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


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
    type: str | None
    firmware: str | None
    board: str | None
    ports: tuple[InfinibandPort, ...]


@dataclass(frozen=True)
class SystemFiles:
    """None where no file of the sort is listed."""

    nodes: Mapping[int, NumaNode] | None
    pci_devices: tuple[PciDevice, ...] | None
    infiniband: tuple[InfinibandDevice, ...]
