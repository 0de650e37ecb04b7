"""The NVIDIA GPUs of a node, read with NVML. A value that a GPU does not offer is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.metrics.samples import GpuSample, MemorySample

__all__ = ["NvidiaGpus", "nvidia_gpus"]

_DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"))  # sandboxes may have only the device
_THROTTLE = {8: "hw_slowdown", 32: "sw_thermal", 64: "hw_thermal", 128: "hw_power_brake"}  # nvmlClocksEventReason...


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
class NvidiaGpus:
    """GPUs: their NVML handles and indexes by UUID; `library` is the module `pynvml`."""

    library: Any
    handles: Mapping[str, Any]
    indexes: Mapping[str, int]
    _uses: dict[str, GpuUse] = field(default_factory=dict)
    _activities: dict[str, Any] = field(default_factory=dict)  # the last GPM sample of each GPU

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

    def states(
        self, host: str, now_s: float, rank_of: Mapping[int, int]
    ) -> Iterator[tuple[GpuSample, list[MemorySample]]]:
        """Yield the state of each GPU, and the memory of each rank on it; `rank_of` maps pids to ranks.

        A lost or partitioned (MIG) GPU has no state.
        """
        nvml = self.library
        for uuid, handle in self.handles.items():
            number = self.indexes[uuid]
            try:
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                heat_c = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            except nvml.NVMLError:
                continue
            memory = self._memory_of_ranks(handle, number, host, now_s, rank_of)
            hot_c, reasons, errors = 0.0, 0, None
            with suppress(nvml.NVMLError):
                hot_c = float(nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
            with suppress(nvml.NVMLError):
                reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            with suppress(nvml.NVMLError):  # a GPU without ECC
                kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
                errors = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
            throttle = tuple(name for bit, name in _THROTTLE.items() if reasons & bit)
            ranks = tuple(one.rank for one in memory)
            mean_busy, tensor = self._activity(uuid, handle)
            busy = busy if mean_busy is None else mean_busy
            yield GpuSample(now_s, host, number, ranks, busy, heat_c, hot_c, throttle, errors, tensor), memory

    def _memory_of_ranks(
        self, handle: Any, number: int, host: str, now_s: float, rank_of: Mapping[int, int]
    ) -> list[MemorySample]:
        """Return the memory that each rank uses on a GPU; [] if NVML reports pids of another PID namespace."""
        used: dict[int, int] = {}
        free = 0
        with suppress(self.library.NVMLError):
            free = int(self.library.nvmlDeviceGetMemoryInfo(handle).free)
            for process in self.library.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in rank_of and process.usedGpuMemory is not None:
                    rank = rank_of[process.pid]
                    used[rank] = used.get(rank, 0) + int(process.usedGpuMemory)
        return [MemorySample(now_s, host, rank, f"gpu {number}", used[rank], free) for rank in sorted(used)]

    def _activity(self, uuid: str, handle: Any) -> tuple[float | None, float | None]:
        """Return the shares of time since the last call with a running kernel and with active tensor cores.

        None before Hopper (no GPM), and at the first call.
        """
        nvml = self.library
        if not hasattr(nvml, "nvmlGpmQueryDeviceSupport"):  # an older pynvml, such as that of an image
            return None, None
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None, None
            sample = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
            before, self._activities[uuid] = self._activities.get(uuid), sample
            if before is None:
                return None, None
            kinds = (nvml.NVML_GPM_METRIC_GRAPHICS_UTIL, nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL)
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(kinds)
            request.sample1, request.sample2 = before, sample
            for metric, kind in zip(request.metrics, kinds, strict=False):  # an array of all metrics of NVML
                metric.metricId = kind
            nvml.nvmlGpmMetricsGet(request)
            nvml.nvmlGpmSampleFree(before)
            return float(request.metrics[0].value) / 100, float(request.metrics[1].value) / 100
        except nvml.NVMLError:
            return None, None


def nvidia_gpus(visible: str | None, library: Any = None) -> NvidiaGpus | None:
    """Return the GPUs in `visible` (CUDA_VISIBLE_DEVICES), or all if it is None; None if NVML is not available."""
    if library is None:
        if not any(path.exists() for path in _DRIVERS):
            return None
        try:
            import pynvml
        except ImportError:  # the Python of a container image may lack pynvml
            return None
        library = pynvml
    try:
        library.nvmlInit()
        handles, indexes = {}, {}
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuid = library.nvmlDeviceGetUUID(handle)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            if visible is None or _is_named(index, uuid, visible.split(",")):
                handles[uuid], indexes[uuid] = handle, index
    except library.NVMLError:
        return None
    return NvidiaGpus(library, handles, indexes)


def _is_named(index: int, uuid: str, named: list[str]) -> bool:
    """Return whether `named` contains the index or a prefix of the UUID of a GPU."""
    return any(one.strip() == str(index) or (one.startswith("GPU-") and uuid.startswith(one.strip())) for one in named)
