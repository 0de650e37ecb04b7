"""The resources of one node that its ranks use, sampled by the guard of the node's first rank: CPU time, memory, GPUs.

There is one small file per node, rewritten at each sample: 1 s after the start, then at growing intervals up to 30 s.
All values come from /proc and NVML; the ranks are not affected, and a value that cannot be read is null.
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

__all__ = ["usage_of_node"]

FIRST_S = 1.0
PERIOD_S = 30.0
_SHORTEST_S = 0.1
_JOIN_S = 2.0  # for a sample that hangs on the run directory's file system
_DRIVER = Path("/proc/driver/nvidia")


@dataclass
class GpuUse:
    """One GPU over all samples; `busy` adds up shares of time, each over the last second or less (NVML)."""

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
    """The running totals of one node. `launcher` is the parent process of the ranks' guards."""

    path: Path
    launcher: int
    first_rank: int
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES
    began: float = field(default_factory=time.monotonic)
    samples: int = 0
    ranks: int = 0
    cpu_s: float = 0.0
    cpus_peak: float = 0.0
    memory_peak_bytes: int = 0
    _sampled_s: float = 0.0  # after the start
    _resident_bytes: int = 0  # at the last sample
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
        # /proc has nothing about exited processes; of the first rank, the kernel kept the largest of its processes.
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        self.memory_peak_bytes = max(self.memory_peak_bytes, largest)
        self.sample()

    def sample(self) -> None:
        """Take one sample, and write the totals. A full disk costs a sample, and no rank."""
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
        """Add the use since the last sample; the present value applies to the whole interval."""
        now_s = time.monotonic() - self.began
        since_s, self._sampled_s = now_s - self._sampled_s, now_s
        # Time never decreases: a rank that has exited removed its own from /proc.
        cpu_s = max(self.cpu_s, sum(one.cpu_s for one in processes.values()))
        if since_s >= _SHORTEST_S:  # a tick of the clock would count for several CPUs
            self.cpus_peak = max(self.cpus_peak, (cpu_s - self.cpu_s) / since_s)
        self.cpu_s = cpu_s
        memory = [memory_of(pid) for pid in processes]
        self.memory_peak_bytes = max(self.memory_peak_bytes, sum(one.peak_bytes for one in memory))
        resident = sum(one.resident_bytes for one in memory)
        # The last sample finds almost nothing left of the memory that was in use until just before.
        self._resident_byte_s += max(self._resident_bytes, resident) * since_s
        self._resident_bytes = resident

    def _sample_until_over(self) -> None:
        # Signals are for the thread that waits for the rank. NVML is queried here: a driver that hangs delays nothing else.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._gpus = nvidia_gpus(self.visible_gpus) if _DRIVER.exists() else None
        pause_s = FIRST_S
        while not self._over.wait(pause_s):
            self.sample()
            pause_s = min(PERIOD_S, 2 * pause_s)


def usage_of_node(attempt: AttemptDirectory, rank: int, environ: Mapping[str, str]) -> NodeUsage | None:
    """The totals of this rank's node if it is the node's first rank; None for any other rank.

    Launchers fill one node after another. The ranks' guards are children of one process on each node: slurmstepd, the
    daemon of mpirun, or the supervisor.
    """
    if not _is_first_of_node(rank, environ):
        return None
    return NodeUsage(attempt.usage_file(rank), os.getppid(), rank, environ.get("CUDA_VISIBLE_DEVICES"))


def _is_first_of_node(rank: int, environ: Mapping[str, str]) -> bool:
    if environ.get("TOOLKIT_LAUNCHER") == "srun":  # components may differ in their ranks per node
        return environ.get("SLURM_LOCALID") == "0"
    per_node = environ.get("TOOLKIT_RANKS_PER_NODE", "")
    return per_node.isdigit() and not rank % max(1, int(per_node))


@dataclass(frozen=True)
class Process:
    """A line of /proc: its parent, and the CPU time of it and of its reaped children."""

    parent: int
    cpu_s: float


def descendants(root: int) -> Iterator[tuple[int, Process]]:
    """Every running process below `root`, which is not included."""
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
        except OSError:  # it has exited meanwhile
            continue
        fields = text.rpartition(")")[2].split()  # from the third on, proc(5)
        yield int(name), Process(int(fields[1]), sum(map(int, fields[11:15])) / ticks_per_s)


@dataclass(frozen=True)
class Memory:
    """A process's resident memory, and its peak."""

    resident_bytes: int = 0
    peak_bytes: int = 0


def memory_of(pid: int) -> Memory:
    """The memory of a process; zeros for one that has exited."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Memory()
    lines = (line.split() for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:")))
    kib = {fields[0]: int(fields[1]) for fields in lines}
    return Memory(kib.get("VmRSS:", 0) * 1024, kib.get("VmHWM:", 0) * 1024)


@dataclass
class NvidiaGpus:
    """GPUs as NVML counts them; `library` is the module of nvidia-ml-py."""

    library: Any
    handles: Mapping[str, Any]
    _uses: dict[str, GpuUse] = field(default_factory=dict)

    def sample(self) -> list[GpuUse]:
        nvml = self.library
        for uuid, handle in self.handles.items():
            try:
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError:  # a partitioned GPU (MIG) reports no utilisation; a lost one reports nothing
                continue
            use = self._uses.setdefault(uuid, GpuUse(uuid))
            use.samples, use.busy, use.memory_bytes = use.samples + 1, use.busy + busy, int(memory.total)
            use.busy_peak = max(use.busy_peak, busy)
            use.memory_peak_bytes = max(use.memory_peak_bytes, int(memory.used))
        return list(self._uses.values())


def nvidia_gpus(visible: str | None, library: Any = None) -> NvidiaGpus | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, all of the node without it; None if NVML is not available."""
    if library is None:
        try:
            import pynvml
        except ImportError:  # for example in an image's Python
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
    """True if its number or a prefix of its UUID is listed."""
    return any(one.strip() == str(index) or (one.startswith("GPU-") and uuid.startswith(one.strip())) for one in named)
