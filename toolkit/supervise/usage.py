"""Sample the CPU time, memory and GPUs that the ranks of one node use. The guard of the node's first rank does this.

Each node has one small file, rewritten at each sample: 1 s after the start, then at growing intervals up to 30 s.
Values come from /proc and NVML, without affecting the ranks. A value that cannot be read is null.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory

__all__ = ["DRIVER", "NvidiaGpus", "descendants", "is_first_of_node", "memory_of", "nvidia_gpus", "usage_of_node"]

FIRST_S = 1.0
PERIOD_S = 30.0
_SHORTEST_S = 0.1
_JOIN_S = 2.0  # time for a sample that hangs on the file system of the run directory
DRIVER = Path("/proc/driver/nvidia")


@dataclass
class GpuUse:
    """The use of one GPU over all samples. `busy` is the sum of utilizations (0 to 1), each over at most 1 s (NVML)."""

    uuid: str
    samples: int = 0
    busy: float = 0.0
    busy_peak: float = 0.0
    memory_peak_bytes: int = 0
    memory_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid, "utilisation": round(self.busy / max(1, self.samples), 3),
            "utilisation_peak": round(self.busy_peak, 3),
            "memory_peak_bytes": self.memory_peak_bytes, "memory_bytes": self.memory_bytes,
        }  # fmt: skip


@dataclass
class NodeUsage:
    """The running totals of one node. `launcher` is the pid of the parent of the ranks' guards."""

    path: Path
    launcher: int
    first_rank: int
    visible_gpus: str | None = None  # the value of CUDA_VISIBLE_DEVICES
    began: float = field(default_factory=time.monotonic)
    samples: int = 0
    ranks: int = 0
    cpu_s: float = 0.0
    cpus_peak: float = 0.0
    memory_peak_bytes: int = 0
    _sampled_s: float = 0.0  # from the start to the last sample
    _resident_bytes: int = 0  # resident memory at the last sample
    _resident_byte_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _gpus: NvidiaGpus | None = None

    def start(self) -> None:
        """Sample in the background until `finish`."""
        self._thread = threading.Thread(target=self._sample_until_over, name="usage", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Take the last sample, once this node's first rank has exited."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                return
        # /proc has no exited processes. For the first rank, the kernel still reports the peak of its largest process.
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        self.memory_peak_bytes = max(self.memory_peak_bytes, largest)
        self.sample()

    def sample(self) -> None:
        """Take one sample, and write the totals. If that fails, only the sample is lost."""
        processes = dict(descendants(self.launcher))
        self.samples += 1
        self.ranks = max(self.ranks, sum(one.parent == self.launcher for one in processes.values()))
        self._add(processes)
        gpus = [one.as_json() for one in self._gpus.sample()] if self._gpus is not None else None
        with suppress(OSError):
            write_json(
                self.path,
                {
                    "host": socket.gethostname(), "first_rank": self.first_rank, "ranks": self.ranks,
                    "seconds": round(self._sampled_s, 1), "cpu_s": round(self.cpu_s, 1),
                    "cpus_peak": round(self.cpus_peak, 2), "memory_peak_bytes": self.memory_peak_bytes,
                    "memory_mean_bytes": round(self._resident_byte_s / self._sampled_s),
                    "gpus": gpus, "samples": self.samples, "time": utc_now(),
                },
                durable=False,
            )  # fmt: skip

    def _add(self, processes: Mapping[int, Process]) -> None:
        """Add the use since the last sample, as if the current memory use applied to the whole interval."""
        now_s = time.monotonic() - self.began
        since_s, self._sampled_s = now_s - self._sampled_s, now_s
        # The total must not decrease when the CPU time of an exited rank disappears from /proc.
        cpu_s = max(self.cpu_s, sum(one.cpu_s for one in processes.values()))
        if since_s >= _SHORTEST_S:  # over a shorter time, one clock tick would count as several CPUs
            self.cpus_peak = max(self.cpus_peak, (cpu_s - self.cpu_s) / since_s)
        self.cpu_s = cpu_s
        memory = [memory_of(pid) for pid in processes]
        self.memory_peak_bytes = max(self.memory_peak_bytes, sum(one.peak_bytes for one in memory))
        resident = sum(one.resident_bytes for one in memory)
        # By the last sample, the rank has exited and freed the memory that it used until then.
        self._resident_byte_s += max(self._resident_bytes, resident) * since_s
        self._resident_bytes = resident

    def _sample_until_over(self) -> None:
        # The thread that waits for the rank handles signals. NVML is queried here, as its driver may hang.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._gpus = nvidia_gpus(self.visible_gpus) if DRIVER.exists() else None
        pause_s = FIRST_S
        while not self._over.wait(pause_s):
            self.sample()
            pause_s = min(PERIOD_S, 2 * pause_s)


def usage_of_node(attempt: AttemptDirectory, rank: int, environ: Mapping[str, str]) -> NodeUsage | None:
    """Return the totals of this rank's node if it is the node's first rank; None for any other rank.

    Launchers fill one node after another. The ranks' guards are children of one process on each node: slurmstepd, the
    daemon of mpirun, or the supervisor.
    """
    if not is_first_of_node(rank, environ):
        return None
    return NodeUsage(attempt.usage_file(rank), os.getppid(), rank, environ.get("CUDA_VISIBLE_DEVICES"))


def is_first_of_node(rank: int, environ: Mapping[str, str]) -> bool:
    if environ.get("TOOLKIT_LAUNCHER") == "srun":  # components may have different ranks per node
        return environ.get("SLURM_LOCALID") == "0"
    per_node = environ.get("TOOLKIT_RANKS_PER_NODE", "")
    return per_node.isdigit() and not rank % max(1, int(per_node))


@dataclass(frozen=True)
class Process:
    """A process in /proc: its parent's pid, and the CPU time of it and its reaped children."""

    parent: int
    cpu_s: float


def descendants(root: int) -> Iterator[tuple[int, Process]]:
    """Yield the pid and the usage of every running descendant of process `root`."""
    processes = dict(_processes())
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    below = list(children.get(root, ()))
    while below:
        pid = below.pop()
        yield pid, processes[pid]
        below += children.get(pid, ())


def _processes() -> Iterator[tuple[int, Process]]:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for name in filter(str.isdigit, (path.name for path in Path("/proc").iterdir())):
        try:
            text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has exited meanwhile
            continue
        fields = text.rpartition(")")[2].split()  # the fields from the third on, proc(5)
        yield int(name), Process(int(fields[1]), sum(map(int, fields[11:15])) / ticks_per_s)


@dataclass(frozen=True)
class Memory:
    """The resident memory of a process, and its peak."""

    resident_bytes: int = 0
    peak_bytes: int = 0


def memory_of(pid: int) -> Memory:
    """Return the memory of a process; zeros if it has exited."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Memory()
    lines = (line.split() for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:")))
    kib = {fields[0]: int(fields[1]) for fields in lines}
    return Memory(kib.get("VmRSS:", 0) * 1024, kib.get("VmHWM:", 0) * 1024)


@dataclass
class NvidiaGpus:
    """GPUs and their NVML handles by UUID; `library` is the module `pynvml`."""

    library: Any
    handles: Mapping[str, Any]
    _uses: dict[str, GpuUse] = field(default_factory=dict)

    def sample(self) -> list[GpuUse]:
        nvml = self.library
        for uuid, handle in self.handles.items():
            try:
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError:  # a partitioned GPU (MIG) reports no utilization; a lost one reports nothing
                continue
            use = self._uses.setdefault(uuid, GpuUse(uuid))
            use.samples, use.busy, use.memory_bytes = use.samples + 1, use.busy + busy, int(memory.total)
            use.busy_peak = max(use.busy_peak, busy)
            use.memory_peak_bytes = max(use.memory_peak_bytes, int(memory.used))
        return list(self._uses.values())


def nvidia_gpus(visible: str | None, library: Any = None) -> NvidiaGpus | None:
    """Return the GPUs in `visible` (CUDA_VISIBLE_DEVICES), or all if it is None; None if NVML is not available."""
    if library is None:
        try:
            import pynvml
        except ImportError:  # the Python of a container image may lack pynvml
            return None
        library = pynvml
    try:
        library.nvmlInit()
        handles = {}
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuid = library.nvmlDeviceGetUUID(handle)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            if visible is None or _is_named(index, uuid, visible.split(",")):
                handles[uuid] = handle
    except library.NVMLError:
        return None
    return NvidiaGpus(library, handles)


def _is_named(index: int, uuid: str, named: list[str]) -> bool:
    """Return whether `named` contains the index or a prefix of the UUID of a GPU."""
    return any(one.strip() == str(index) or (one.startswith("GPU-") and uuid.startswith(one.strip())) for one in named)
