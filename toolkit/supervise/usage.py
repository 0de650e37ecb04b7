"""The CPU time, memory and GPUs that the ranks of one node use, in one small file that each sample rewrites.

Values come from /proc and NVML, without affecting the ranks. A value that cannot be read is null.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.rundir.files import utc_now, write_json
from toolkit.supervise.gpus import NvidiaGpus
from toolkit.supervise.proc import below, bytes_of, children_in_proc, status_of

__all__ = ["NodeUsage", "descendants"]

_SHORTEST_S = 0.1


@dataclass
class NodeUsage:
    """The running totals of one node. `launcher` is the pid of the process that started the ranks."""

    path: Path
    launcher: int
    first_rank: int
    gpus: NvidiaGpus | None = None
    began: float = field(default_factory=time.monotonic)
    samples: int = 0
    ranks: int = 0
    cpu_s: float = 0.0
    cpus_peak: float = 0.0
    memory_peak_bytes: int = 0
    _sampled_s: float = 0.0  # from the start to the last sample
    _resident_bytes: int = 0  # resident memory at the last sample
    _resident_byte_s: float = 0.0

    def finish(self) -> None:
        """Take the last sample, once this node's first rank has exited."""
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
        gpus = [one.as_json() for one in self.gpus.sample()] if self.gpus is not None else None
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
        memory = [status_of(pid) for pid in processes]
        self.memory_peak_bytes = max(self.memory_peak_bytes, sum(bytes_of(one, "VmHWM") for one in memory))
        resident = sum(bytes_of(one, "VmRSS") for one in memory)
        # By the last sample, the rank has exited and freed the memory that it used until then.
        self._resident_byte_s += max(self._resident_bytes, resident) * since_s
        self._resident_bytes = resident


@dataclass(frozen=True)
class Process:
    """A process in /proc: its parent's pid, and the CPU time of it and its reaped children."""

    parent: int
    cpu_s: float


def descendants(root: int) -> Iterator[tuple[int, Process]]:
    """Yield the pid and the usage of every running descendant of process `root`."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # One process of the node does this every 30 s, and some nodes hide slurmstepd, so that its lists cannot be read.
    for pid in below(root, children_in_proc(is_whole=True)):
        with suppress(OSError):  # the process has exited meanwhile
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            fields = text.rpartition(")")[2].split()  # the fields from the third on, proc(5)
            yield pid, Process(int(fields[1]), sum(map(int, fields[11:15])) / ticks_per_s)
