"""The physical GPU of a rank's "cuda:<i>", found without torch: CUDA counts only GPUs that the environment shows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PhysicalGpu", "gpu_of_device", "gpus_of_process"]

_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True)
class PhysicalGpu:
    """A GPU by its process-independent names: its UUID, and its PCI address as NVML writes it."""

    uuid: str
    bus: str


def gpus_of_process(environ: Mapping[str, str], library: Any = None) -> list[PhysicalGpu]:
    """Return the GPUs that CUDA shows to this process, cuda:0 first; empty if NVML does not report them.

    Args:
        library: the module of nvidia-ml-py, imported if None.
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
    except nvml.NVMLError:  # a GPU has fallen off the bus: CUDA's numbers of the others are unknown
        return []
    finally:
        nvml.nvmlShutdown()


def gpu_of_device(device: str, gpus: list[PhysicalGpu]) -> PhysicalGpu | None:
    """Return this process's GPU of a torch device string ("cuda:1"); None for a CPU or an unknown one."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(number) or int(number) >= len(gpus):
        return None
    return gpus[int(number)]


def _shown(nvml: Any, environ: Mapping[str, str]) -> list[PhysicalGpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    all_gpus = [_gpu(nvml, handle) for handle in handles]
    # NVML numbers by bus; CUDA does so for equal GPUs, or with CUDA_DEVICE_ORDER.
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
            break  # CUDA, too, stops at the first invalid entry
        shown.append(gpu)
    return shown


def _named(nvml: Any, name: str, gpus: list[PhysicalGpu], *, by_bus: bool) -> PhysicalGpu | None:
    """Return a GPU by its number, by its UUID or a unique prefix, or by the UUID of one of its MIG devices."""
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
