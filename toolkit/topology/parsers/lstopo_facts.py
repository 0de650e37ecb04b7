"""What `lstopo` tells of a host, on a terminal or in XML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Memory that no processor is next to: of a GPU, on the package beside DRAM, on a memory bus of its own.
MEMORY_ALONE = frozenset({"GPUMemory", "MCDRAM", "HBM", "SPM", "NVM", "CXL-DRAM", "CXL-NVM"})


@dataclass(frozen=True)
class HostObjects:
    """How many objects of each type were printed; None where lines of that type are damaged or lost."""

    packages: int | None = None
    numa_nodes: int | None = None
    cores: int | None = None
    processing_units: int | None = None
    l3_caches: int | None = None
    host_bridges: int | None = None
    pci_devices: int | None = None
    groups: int | None = None
    os_devices: int | None = None
    memory_only_nodes: int | None = None


def host_objects(counts: Mapping[str, int], doubtful: Collection[str], memory_alone: int) -> HostObjects:
    """Facts of counts by hwloc's names of the types; those of `doubtful` types are unknown."""

    def count(name: str) -> int | None:
        return None if name in doubtful else counts.get(name, 0)

    return HostObjects(
        packages=count("Package"),
        numa_nodes=count("NUMANode"),
        cores=count("Core"),
        processing_units=count("PU"),
        l3_caches=count("L3Cache"),
        host_bridges=None if "Bridge" in doubtful else counts.get("HostBridge", 0),
        pci_devices=count("PCIDev"),
        groups=count("Group"),
        os_devices=count("OSDev"),
        memory_only_nodes=None if "NUMANode" in doubtful else memory_alone,
    )
