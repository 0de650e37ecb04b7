"""Prepare a rank before it connects to the others: set CPU affinity, threads, and variables for the network.

This runs before torch is imported, because existing threads keep their affinity, and libraries read OMP_NUM_THREADS and
NCCL variables only once. toolkit does not change the affinity of executables: MPI programs bind themselves, and a mask
from toolkit would restrict their choice.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.supervise.shape import shape_of_job
from toolkit.terminal.talk import say
from toolkit.topology.nccl.environment import SYSTEM_FILE, of_process
from toolkit.topology.nccl.finding import effective
from toolkit.topology.nccl.node import read_node
from toolkit.topology.nccl.settings import fabric_settings
from toolkit.world.address import choose_interface
from toolkit.world.binding import Binding, Processors, RankOfNode, bind, unbound
from toolkit.world.cpu_lists import cpu_list, read_cpu_list
from toolkit.world.device import visible_gpus
from toolkit.world.facts import World
from toolkit.world.masks import Masks, masks_of_node
from toolkit.world.physical_gpu import PhysicalGpu, gpus_of_process

PROCESS_ROOT = Path("/proc/self")
SYSTEM_ROOT = Path("/sys")


def read_processors(cpus: Iterable[int], root: Path = SYSTEM_ROOT) -> Processors:
    """Return the NUMA nodes, and the cores of `cpus`, as far as the kernel reports them."""
    numa_nodes = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        numa_nodes[int(folder.name.removeprefix("node"))] = _cpus(folder / "cpulist")
    cores: dict[int, frozenset[int]] = {}
    for cpu in cpus:
        if cpu not in cores:  # read only one file per core, since a node has hundreds of CPUs
            siblings = _cpus(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}
            cores |= dict.fromkeys(siblings, siblings)
    return Processors(numa_nodes, tuple(dict.fromkeys(cores.values())))


def numa_node_of_gpu(bus: str, processors: Processors, root: Path = SYSTEM_ROOT) -> int | None:
    """Return the NUMA node next to a GPU, given its PCI address from NVML; None if the firmware does not report it."""
    with_cpus = [number for number, cpus in processors.numa_nodes.items() if cpus]
    if len(with_cpus) == 1:  # the firmware often reports -1 here
        return with_cpus[0]
    from toolkit.topology.sources.nvml import pci_address  # slow to import, and needed only with GPUs

    text = _read(root / "bus/pci/devices" / pci_address(bus) / "numa_node")
    return int(text) if text.isdecimal() else None


def cpu_quota(process_root: Path = PROCESS_ROOT, system_root: Path = SYSTEM_ROOT) -> float | None:
    """Return the cgroup CPU quota of this process in CPUs, such as `--cpus` of a container; None if there is no limit.

    The affinity mask does not contain it: a container may see all CPUs of the machine but have a quota of two.
    """
    quotas = [quota for folder in _control_groups(process_root, system_root) if (quota := _quota(folder))]
    return min(quotas, default=None)


def _control_groups(process_root: Path, system_root: Path) -> Iterator[Path]:
    """Yield the cgroups (v1 and v2) of this process that can limit CPU time, with all their parents."""
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
        return None  # "max" or -1: no limit
    return int(words[0]) / int(words[1])


def _cpus(path: Path) -> frozenset[int]:
    return frozenset(read_cpu_list(_read(path)) or ())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # the kernel or the container does not provide this file
        return ""


def set_fabric(
    world: World, interface: str, environ: MutableMapping[str, str], system_file: Path = SYSTEM_FILE
) -> list[str]:
    """Set the network variables for this node; return a log line for each on local rank 0, [] on other ranks.

    A variable that is set in a file that NCCL reads is not set, because the environment would override the file.
    """
    gpus = visible_gpus(environ) if world.device.startswith("cuda") else 0
    # On a single node, `meet` uses loopback, so no interface needs to be set.
    name = "" if world.nodes == 1 else choose_interface(interface, single_node=False)[0]
    lines, given = [], dict(environ)
    try:
        given = {name: one.value for name, one in effective(of_process(environ, system_file)).items()}
    except ToolkitError as error:  # NCCL ignores such a file, too
        lines.append(f"ignoring {error.where}: {error.message}")
    for setting in fabric_settings(read_node(name, world.nodes, gpus), given):
        if setting.kept is None:
            environ[setting.name] = setting.value
            lines.append(f"set {setting.line}")
    return lines if world.local_rank == 0 else []


def prepare(world: World, job: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> None:
    """Bind this process to its CPUs, and set variables that are not yet set in its environment.

    Collective if MPI started the ranks. `job` is the resolved job. The log of the rank states each setting and its reason.

    Raises:
        ToolkitError: this node does not have the interface in the site file.
    """
    on_gpu, lines = world.device.startswith("cuda"), []
    if on_gpu or world.nodes > 1:  # otherwise ranks always use loopback
        lines = set_fabric(world, str((job.get("network") or {}).get("interface") or ""), environ)
    # After `set_fabric`, which may set CUDA_DEVICE_ORDER and so change the GPU numbers.
    gpus = gpus_of_process(environ) if on_gpu else []
    masks = masks_of_node(world, environ)
    lines += set_processors(world, job, masks, gpus, environ)
    for line in lines:
        say(line)


def set_processors(
    world: World,
    job: Mapping[str, Any],
    masks: Masks,
    gpus: list[PhysicalGpu],
    environ: MutableMapping[str, str],
    *,
    system_root: Path = SYSTEM_ROOT,
    process_root: Path = PROCESS_ROOT,
) -> list[str]:
    """Bind this process to its CPUs and set OMP_NUM_THREADS; return the log lines.

    Args:
        job: the resolved job.
        masks: the CPU mask of each rank of the node, as the launcher set it.
        gpus: the GPUs that CUDA shows to this process.
    """
    given = masks[world.local_rank]
    assert given is not None  # the mask of this process is always known
    processors = read_processors(given, system_root)
    near = _near(world, [numa_node_of_gpu(gpu.bus, processors, system_root) for gpu in gpus])
    on_gpu = world.device.startswith("cuda")
    ranks = [RankOfNode(mask, node) for mask, node in zip(masks, near, strict=True)]
    if job["job"].get("bind") == "none":
        chosen = replace(unbound(world.local_rank, ranks, processors), reason='job.bind = "none"')
    else:
        chosen = _hold(bind(world.local_rank, ranks, processors, on_gpu=on_gpu), given)
    threads = _threads(chosen, world, job, environ, cpu_quota(process_root, system_root))
    kept = environ.get("OMP_NUM_THREADS")
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    held = chosen.cpus != given
    if not (held or on_gpu or (world.local_rank == 0 and world.local_size > 1)):
        return []
    affinity = (
        f"bound to CPUs {cpu_list(chosen.cpus)} of {cpu_list(given)}" if held else f"left on CPUs {cpu_list(given)}"
    )
    count = f"OMP_NUM_THREADS={threads}" if kept is None else f"OMP_NUM_THREADS={kept} (already set)"
    return [f"{affinity}, {count}: {chosen.reason}"]


def _near(world: World, near: list[int | None]) -> list[int | None]:
    """Return the NUMA node of each local rank's GPU, given the NUMA nodes of the GPUs that this rank sees."""
    known: list[int | None] = [None] * world.local_size
    own = int(world.device.partition(":")[2] or 0)
    if own == world.local_rank:  # every rank sees all GPUs, in the order of local ranks
        known[: len(near)] = near[: world.local_size]
    elif own < len(near):
        known[world.local_rank] = near[own]
    return known


def _hold(chosen: Binding, given: frozenset[int]) -> Binding:
    if chosen.cpus == given:
        return chosen
    try:
        # Data workers and threads started later inherit the affinity.
        os.sched_setaffinity(0, chosen.cpus)
    except OSError as error:  # the CPUs are offline, or a sandbox forbids the call
        return Binding(given, chosen.threads, f"the kernel rejected CPUs {cpu_list(chosen.cpus)}: {error.strerror}")
    return chosen


def _threads(
    chosen: Binding, world: World, job: Mapping[str, Any], environ: Mapping[str, str], quota: float | None
) -> int:
    """Return the number of threads: one per core, or fewer if Slurm, the job or the cgroup quota allows fewer CPUs."""
    limits = [chosen.threads]
    # Outside of Slurm, use cpus_per_rank only if it was set: its default of 1 would waste cores.
    if "SLURM_JOB_ID" in environ or "job.cpus_per_rank" in (job.get("origins") or {}):
        limits.append(shape_of_job(job).component_of(world.rank).cpus_per_rank or 1)
    if quota is not None:
        limits.append(int(quota / world.local_size))
    return max(1, min(limits))
