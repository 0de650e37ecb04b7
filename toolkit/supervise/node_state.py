"""The state of one node: memory of its ranks, GPUs and network devices. The guard of its first rank writes it every 10 s.

The file is `windows/rank-FFFFF.json`; the supervisor and readers of the run build samples from it. Standard library, and
NVML if the node has it. A value that cannot be read is missing.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.metrics.memory_limits import memories, requested_bytes
from toolkit.metrics.samples import ClockSample, GpuSample, LinkSample, MemorySample, Sample
from toolkit.rundir.files import read_json, read_json_or_none, write_json
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.gpus import NvidiaGpus
from toolkit.supervise.proc import below, bytes_of, children_in_proc, status_of
from toolkit.supervise.rank_files import is_guard

__all__ = ["NodeState", "samples_in"]

STATE_PERIOD_S = 10.0
CLOCK_ERROR_S = 1.0  # time stamps of a file system may have whole seconds
_ERRORS = ("symbol_error", "port_rcv_errors", "port_xmit_discards", "local_link_integrity_errors")


@dataclass
class NodeState:
    """Writes the state of a node. `launcher` is the pid of the process that started the ranks."""

    attempt: AttemptDirectory
    host: str
    launcher: int
    first_rank: int
    root: Path = Path("/")
    requested_bytes: int = field(default_factory=lambda: requested_bytes(os.environ))
    _ranks: dict[int, int] = field(default_factory=dict)  # by the pid of the guard
    _processes: Set[int] = frozenset()  # that the launcher has started
    _share: float = 1.0  # of the resident memory, in which each page counts once
    _count_at: float = 0.0
    _read: set[str] = field(default_factory=set)  # names of files in `ranks/`

    def write(self, gpus: NvidiaGpus | None) -> None:
        """Write the state of this moment."""
        now_s = time.time()
        processes = self._processes_of_ranks()
        rank_of_pid = {pid: rank for rank, pids in processes.items() for pid in pids}
        states = list(gpus.states(self.host, now_s, rank_of_pid)) if gpus is not None else []
        memory = [*self._memory(processes, now_s), *(one for _, of_gpu in states for one in of_gpu)]
        state = {
            "host": self.host, "time_s": time.time(), "memory": [asdict(one) for one in memory],
            "gpus": [asdict(gpu) for gpu, _ in states],
            "links": [asdict(one) for one in self._links(now_s)],
        }  # fmt: skip
        write_json(self.attempt.node_state(self.first_rank), state, durable=False)

    def _processes_of_ranks(self) -> dict[int, list[int]]:
        """Return the pids of each rank on this node: its guard and the descendants of that."""
        children = children_in_proc(is_whole=True)
        self._processes = set(below(self.launcher, children))
        if len(self._ranks.keys() & self._processes) < len(children(self.launcher)):
            self._find_ranks()
        return {rank: [pid, *below(pid, children)] for pid, rank in self._ranks.items() if pid in self._processes}

    def signal_guards(self, number: int) -> None:
        """Signal the guards of the ranks on this node."""
        for pid in self._ranks:
            if is_guard(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _find_ranks(self) -> None:
        """Read the files of ranks that have started since the last call. Those of other nodes are read once."""
        for path in self.attempt.ranks.glob("rank-*.json"):
            if path.name not in self._read:
                with suppress(ToolkitError, OSError):  # the rank is just writing it
                    if start := read_json_or_none(path):
                        self._read.add(path.name)
                        if start["host"] == self.host:
                            self._ranks[start["pid"]] = rank_of(path)

    def _memory(self, processes: Mapping[int, Iterable[int]], now_s: float) -> Iterator[MemorySample]:
        resident = {pid: bytes_of(status_of(pid), "VmRSS") for pid in self._processes}
        whole = sum(resident.values())
        used, free = self._used_and_free(whole)
        for rank, pids in processes.items():
            of_rank = round(used * sum(resident.get(pid, 0) for pid in pids) / whole) if whole else 0
            yield MemorySample(now_s, self.host, rank, "host", of_rank, free)
            # Each process has RLIMIT_DATA for itself.
            if limits := list(filter(None, map(_data_limit, pids))):
                most, own = max(limits, key=lambda one: one[1] / one[0])
                yield MemorySample(now_s, self.host, rank, f"rank {rank} under ulimit -d", own, max(0, most - own))

    def _used_and_free(self, resident: int) -> tuple[int, int]:
        """Return the memory that all processes use, given their resident memory, and what is free for them.

        Pages that forked processes share, such as a data set that data loaders read, are resident in each of them. They count
        once in the use of a cgroup or node, which is also that of other processes.
        """
        limits = list(memories(self.root))
        used = max(0, min([resident, *(limit - left for _, left, limit in limits)]))
        frees = [left for _, left, _ in limits]
        if self.requested_bytes and not any(
            limit <= self.requested_bytes for name, _, limit in limits if name != "the node"
        ):  # without such a cgroup, slurmstepd counts the processes of the step, and may kill all of them
            used = min(used, self._unshared(resident))
            frees.append(max(0, self.requested_bytes - used))
        return used, min(frees, default=0)

    def _unshared(self, resident: int) -> int:
        """Return the memory of all processes in which each page counts once, given the sum of their resident memory.

        The kernel needs 20 ms per GiB to count that, so it does so only near the limit, for 1 % of the time.
        """
        if resident > self.requested_bytes / 2 and time.monotonic() >= self._count_at:
            began = time.monotonic()
            self._share = min(1.0, sum(map(_proportional_bytes, self._processes)) / resident)
            self._count_at = time.monotonic() + 100 * (time.monotonic() - began)
        return round(resident * self._share)

    def _links(self, now_s: float) -> Iterator[LinkSample]:
        for port in sorted(self.root.glob("sys/class/infiniband/*/ports/*/counters")):
            device = f"{port.parts[-4]}/{port.parts[-2]}"
            with suppress(OSError, ValueError):  # a sum without one counter would look like errors later
                errors = sum(_counter(port / name) for name in _ERRORS)
                yield LinkSample(now_s, self.host, device, errors, _counter(port / "link_downed"))


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, in which a page that N processes share counts 1/N; 0 if it has exited."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)
    return bytes_of(status_of(pid), "VmRSS")  # of another user, or an old kernel


def _data_limit(pid: int) -> tuple[int, int] | None:
    """Return (RLIMIT_DATA, bytes that count for it) of a process; None without a limit, or if it has ended."""
    with suppress(OSError):
        most, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
        own = bytes_of(status_of(pid), "VmData")
        return (most, own) if most > 0 else None  # RLIM_INFINITY is -1
    return None


def _counter(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:  # a driver without this counter
        return 0


def samples_in(path: Path) -> list[Sample]:
    """Return the samples in the file of a node.

    The file server stamps the file, so the time in it and the time of the file compare the clocks of nodes.

    Raises:
        DamagedFileError: the file has another form.
        OSError: it cannot be read.
    """
    written_s = path.stat().st_mtime
    state = read_json(path)
    if path.stat().st_mtime != written_s:  # replaced meanwhile
        written_s, state = path.stat().st_mtime, read_json(path)
    try:
        time_s, host = float(state["time_s"]), str(state["host"])
        gpus = ({**one, "ranks": tuple(one["ranks"]), "throttle": tuple(one["throttle"])} for one in state["gpus"])
        return [
            *(MemorySample(**one) for one in state["memory"]), *(GpuSample(**one) for one in gpus),
            *(LinkSample(**one) for one in state["links"]),
            ClockSample(time_s, host, time_s - written_s, uncertainty_s=CLOCK_ERROR_S),
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"not the state of a node: {error}", where=str(path)) from error
