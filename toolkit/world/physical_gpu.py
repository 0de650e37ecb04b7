"""Map a rank's "cuda:<i>" to a physical GPU without torch; CUDA counts only GPUs that CUDA_VISIBLE_DEVICES lists."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PhysicalGpu", "gpu_of_device", "gpus_of_process"]

_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True)
class PhysicalGpu:
    """The names of a GPU that do not depend on the process: its UUID, and its PCI address as NVML formats it."""

    uuid: str
    bus: str


def gpus_of_process(environ: Mapping[str, str], library: Any = None) -> list[PhysicalGpu]:
    """Return the GPUs that CUDA shows to this process, cuda:0 first; empty if NVML does not report them.

    Args:
        library: the module pynvml of nvidia-ml-py; None imports it.
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
    except nvml.NVMLError:  # a GPU has fallen off the bus, so the CUDA indices of the others are unknown
        return []
    finally:
        nvml.nvmlShutdown()


def gpu_of_device(device: str, gpus: list[PhysicalGpu]) -> PhysicalGpu | None:
    """Return the GPU of a torch device string ("cuda:1"); None for a CPU or an unknown GPU."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not _INDEX.fullmatch(number) or int(number) >= len(gpus):
        return None
    return gpus[int(number)]


def _shown(nvml: Any, environ: Mapping[str, str]) -> list[PhysicalGpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    all_gpus = [_gpu(nvml, handle) for handle in handles]
    # NVML numbers GPUs by PCI bus. CUDA does so only if all GPUs are equal, or as CUDA_DEVICE_ORDER requests.
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
            break  # CUDA also stops at the first invalid entry
        shown.append(gpu)
    return shown


def _named(nvml: Any, name: str, gpus: list[PhysicalGpu], *, by_bus: bool) -> PhysicalGpu | None:
    """Return a GPU by its index, by its UUID or a unique prefix of it, or by the UUID of one of its MIG devices."""
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
