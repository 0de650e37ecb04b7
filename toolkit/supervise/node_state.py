"""The state of one node: memory of its ranks, GPUs and network devices. The guard of its first rank writes it every 10 s.

The file is `windows/rank-FFFFF.json`; the supervisor and readers of the run build samples from it. Standard library, and
NVML if the node has it. A value that cannot be read is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.metrics.memory_limits import memories
from toolkit.metrics.samples import ClockSample, GpuSample, LinkSample, MemorySample, Sample
from toolkit.rundir.files import read_json, read_json_or_none, write_json
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.usage import NvidiaGpus, descendants, memory_of

__all__ = ["NodeState", "samples_in"]

STATE_PERIOD_S = 10.0
CLOCK_ERROR_S = 1.0  # time stamps of a file system may have whole seconds
_ERRORS = ("symbol_error", "port_rcv_errors", "port_xmit_discards", "local_link_integrity_errors")
_THROTTLE = {8: "hw_slowdown", 32: "sw_thermal", 64: "hw_thermal", 128: "hw_power_brake"}  # nvmlClocksEventReason...


@dataclass
class NodeState:
    """Writes the state of a node. `launcher` is the pid of the parent of the ranks' guards."""

    attempt: AttemptDirectory
    host: str
    launcher: int
    first_rank: int
    root: Path = Path("/")

    def write(self, gpus: NvidiaGpus | None) -> None:
        """Write the state of this moment."""
        now_s = time.time()
        handles = enumerate(gpus.handles.values()) if gpus is not None else ()
        state = {
            "host": self.host, "time_s": now_s,
            "memory": [asdict(one) for one in self._memory(now_s)],
            "gpus": [asdict(one) for number, gpu in handles for one in _gpu(gpus, gpu, number, self.host, now_s)],
            "links": [asdict(one) for one in self._links(now_s)],
        }  # fmt: skip
        write_json(self.attempt.node_state(self.first_rank), state, durable=False)

    def _memory(self, now_s: float) -> Iterator[MemorySample]:
        """Yield the memory of each rank: the resident memory of its guard's descendants."""
        free = min((left for _, left, _ in memories(self.root)), default=0)
        guards = {pid for pid, process in descendants(self.launcher) if process.parent == self.launcher}
        for path in self.attempt.ranks.glob("rank-*.json"):
            with suppress(ToolkitError, OSError):  # the rank is just writing it
                if (start := read_json_or_none(path)) and start["pid"] in guards and start["host"] == self.host:
                    used = sum(memory_of(pid).resident_bytes for pid, _ in descendants(start["pid"]))
                    yield MemorySample(now_s, self.host, rank_of(path), "host", used, free)

    def _links(self, now_s: float) -> Iterator[LinkSample]:
        for port in sorted(self.root.glob("sys/class/infiniband/*/ports/*/counters")):
            errors = sum(_counter(port / name) for name in _ERRORS)
            device = f"{port.parts[-4]}/{port.parts[-2]}"
            yield LinkSample(now_s, self.host, device, errors, _counter(port / "link_downed"))


def _counter(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # a driver without this counter
        return 0


def _gpu(gpus: NvidiaGpus | None, handle: Any, number: int, host: str, now_s: float) -> Iterator[GpuSample]:
    """Yield the state of a GPU; nothing if it is lost or partitioned (MIG)."""
    assert gpus is not None  # it has the handle
    nvml = gpus.library
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        heat = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    except nvml.NVMLError:
        return
    hot, reasons, errors = 0.0, 0, 0
    with suppress(nvml.NVMLError):
        hot = float(nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
    with suppress(nvml.NVMLError):
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    with suppress(nvml.NVMLError):  # a GPU without ECC
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        errors = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
    throttle = tuple(name for bit, name in _THROTTLE.items() if reasons & bit)
    yield GpuSample(now_s, host, number, (), busy, heat, hot, throttle, errors)


def samples_in(path: Path) -> list[Sample]:
    """Return the samples in the file of a node.

    The file server stamps the file, so the time in it and the time of the file compare the clocks of nodes.

    Raises:
        DamagedFileError: the file has another form.
        OSError: it cannot be read.
    """
    state = read_json(path)
    try:
        time_s, host = float(state["time_s"]), str(state["host"])
        gpus = ({**one, "ranks": tuple(one["ranks"]), "throttle": tuple(one["throttle"])} for one in state["gpus"])
        return [
            *(MemorySample(**one) for one in state["memory"]), *(GpuSample(**one) for one in gpus),
            *(LinkSample(**one) for one in state["links"]),
            ClockSample(time_s, host, time_s - path.stat().st_mtime, uncertainty_s=CLOCK_ERROR_S),
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"not the state of a node: {error}", where=str(path)) from error
