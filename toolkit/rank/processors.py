"""The kernel's data on this node's CPUs: NUMA nodes, cores, the NUMA node of a GPU, and CPU quotas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.world.binding import Processors
from toolkit.world.cpu_lists import read_cpu_list

PROCESS_ROOT = Path("/proc/self")
SYSTEM_ROOT = Path("/sys")


def read_processors(cpus: Iterable[int], root: Path = SYSTEM_ROOT) -> Processors:
    """The NUMA nodes, and the cores of `cpus`. What the kernel does not report is omitted."""
    numa_nodes = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        numa_nodes[int(folder.name.removeprefix("node"))] = _cpus(folder / "cpulist")
    cores: dict[int, frozenset[int]] = {}
    for cpu in cpus:
        if cpu not in cores:  # one file a core: a node has hundreds of CPUs
            siblings = _cpus(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}
            cores |= dict.fromkeys(siblings, siblings)
    return Processors(numa_nodes, tuple(dict.fromkeys(cores.values())))


def numa_node_of_gpu(bus: str, processors: Processors, root: Path = SYSTEM_ROOT) -> int | None:
    """The NUMA node next to a GPU, by its PCI address as NVML writes it; None if the firmware does not report it."""
    with_cpus = [number for number, cpus in processors.numa_nodes.items() if cpus]
    if len(with_cpus) == 1:  # the firmware often reports -1 here
        return with_cpus[0]
    from toolkit.topology.sources.nvml import pci_address  # with GPUs only: its imports take tens of milliseconds

    text = _read(root / "bus/pci/devices" / pci_address(bus) / "numa_node")
    return int(text) if text.isdecimal() else None


def cpu_quota(process_root: Path = PROCESS_ROOT, system_root: Path = SYSTEM_ROOT) -> float | None:
    """The CPU quota of this process's cgroups in CPUs, such as a container's `--cpus`; None: no limit.

    The affinity mask does not show it: a container may see all CPUs of the machine with a quota of two.
    """
    quotas = [quota for folder in _control_groups(process_root, system_root) if (quota := _quota(folder))]
    return min(quotas, default=None)


def _control_groups(process_root: Path, system_root: Path) -> Iterator[Path]:
    """The cgroups (v1 and v2) of this process that limit CPU time, with all their parents."""
    top = system_root / "fs/cgroup"
    for line in _read(process_root / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = top if not controllers else top / "cpu" if "cpu" in controllers.split(",") else None
        if base is not None:
            inner = base / path.strip("/")
            yield inner
            yield from (folder for folder in inner.parents if folder.is_relative_to(base))


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max", or -1
    return int(words[0]) / int(words[1])


def _cpus(path: Path) -> frozenset[int]:
    return frozenset(read_cpu_list(_read(path)) or ())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # the kernel or container does not provide it
        return ""
