"""Which GPU of the machine a rank's "cuda:<i>" is, found without torch: CUDA counts only what the environment shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True)
class PhysicalGpu:
    """A GPU by the names that it has for every process: its UUID, and its PCI address as NVML writes it."""

    uuid: str
    bus: str


def gpus_of_process(environ: Mapping[str, str], library: Any = None) -> list[PhysicalGpu]:
    """The GPUs that CUDA shows to this process, cuda:0 first; empty where NVML does not tell.

    Args:
        library: the module of nvidia-ml-py, imported when None.
    """
    if library is None:
        try:
            import pynvml

            library = pynvml
        except ModuleNotFoundError:
            return []
    nvml = library
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return _shown(nvml, environ)
    except nvml.NVMLError:  # a GPU that has fallen off the bus: which of the others CUDA counts is not known
        return []
    finally:
        nvml.nvmlShutdown()


def gpu_of_device(device: str, gpus: list[PhysicalGpu]) -> PhysicalGpu | None:
    """The GPU behind a torch device string ("cuda:1"), of those of this process; None for a CPU or an unknown one."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(number) or int(number) >= len(gpus):
        return None
    return gpus[int(number)]


def _shown(nvml: Any, environ: Mapping[str, str]) -> list[PhysicalGpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    all_gpus = [_gpu(nvml, handle) for handle in handles]
    # NVML numbers by the bus; CUDA does so of equal GPUs, or when it is told to.
    by_bus = (
        environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({nvml.nvmlDeviceGetName(one) for one in handles}) < 2
    )
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return all_gpus if by_bus else []
    shown = []
    for name in names.split(","):
        gpu = _named(nvml, name.strip(), all_gpus, by_bus=by_bus)
        if gpu is None:
            break  # CUDA too reads no further than the first that is none
        shown.append(gpu)
    return shown


def _named(nvml: Any, name: str, gpus: list[PhysicalGpu], *, by_bus: bool) -> PhysicalGpu | None:
    """A GPU by its number, by its UUID or as much of it as is clear, or by the UUID of a MIG device of it."""
    if _INDEX.fullmatch(name):
        return gpus[int(name)] if by_bus and int(name) < len(gpus) else None
    if name.startswith("GPU-"):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        return found[0] if len(found) == 1 else None
    if name.startswith("MIG-"):
        return _gpu(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(name)))
    return None


def _gpu(nvml: Any, handle: Any) -> PhysicalGpu:
    return PhysicalGpu(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetPciInfo(handle).busId))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
