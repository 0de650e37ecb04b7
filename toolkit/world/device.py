"""Choose the device of a rank, without torch."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import OwnFailureError, ToolkitError

__all__ = ["own_slice", "visible_gpus"]

_WITHOUT_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU, created by the NVIDIA driver
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # one folder per device of the AMD driver


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that this process may use: those that the driver reports and the environment allows."""
    nvidia = _listed(_nvidia_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    return nvidia or _listed(_amd_gpus(), environ.get("ROCR_VISIBLE_DEVICES"))


def _listed(count: int, names: str | None) -> int:
    if names is None:
        return count
    listed = _names(names)
    # The driver counts whole GPUs, and each may have several slices.
    return len(listed) if count and _are_slices(listed) else min(count, len(listed))


def _names(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def _are_slices(names: list[str]) -> bool:
    return any(name.startswith("MIG-") for name in names)


def own_slice(local_rank: int, environ: Mapping[str, str]) -> str:
    """Return the MIG slice of a rank, if CUDA_VISIBLE_DEVICES lists several: CUDA shows a process only the first one."""
    names = _names(environ.get("CUDA_VISIBLE_DEVICES", ""))
    return names[local_rank] if 1 < len(names) > local_rank and _are_slices(names) else ""


def _nvidia_gpus() -> int:
    """Return the number of GPUs from NVML; 0 without an NVIDIA driver."""
    return _ask_nvml()[0]


def _ask_nvml() -> tuple[int, str]:
    """Return the number of GPUs, and the error of NVML, "" if there is none or no driver on this host."""
    try:
        import pynvml
    except ModuleNotFoundError:  # a container without NVML; this folder does not list MIG devices
        return sum(1 for _ in _NVIDIA_GPUS.glob("*")), ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return 0, "" if getattr(error, "value", None) in _WITHOUT_DRIVER else str(error)
    try:
        return int(pynvml.nvmlDeviceGetCount()), ""
    finally:
        pynvml.nvmlShutdown()


def _amd_gpus() -> int:
    """Return the number of KFD devices with compute units, which a CPU lacks; torch names these GPUs cuda, too."""
    count = 0
    for properties in _KFD_NODES.glob("*/properties"):
        words = properties.read_text(encoding="utf-8").split()
        if "simd_count" in words and int(words[words.index("simd_count") + 1]) > 0:
            count += 1
    return count


def choose_device(local_rank: int, local_size: int, environ: Mapping[str, str] | None = None) -> str:
    """Return "cuda:<i>" for a rank with its own GPU, "cuda:0" if Slurm shows each task only its own, else "cpu".

    "cuda:0" is also the slice of a rank, if the caller sets CUDA_VISIBLE_DEVICES to `own_slice`.

    Raises:
        OwnFailureError: the environment names GPUs, but their library does not work.
        ToolkitError: there are fewer GPUs than ranks.
    """
    env = os.environ if environ is None else environ
    gpus = visible_gpus(env)
    names = _names(env.get("CUDA_VISIBLE_DEVICES", ""))
    if gpus == 0:
        if names and (problem := _ask_nvml()[1]):
            raise OwnFailureError(
                f"the job has GPUs ({','.join(names)}), but NVML reports none: {problem}",
                where=socket.gethostname(),
                fix="report the node to site support and exclude it with job.exclude; a job for CPUs sets gpus_per_node = 0",
            )
        return "cpu"
    if gpus >= local_size:
        return "cuda:0" if _are_slices(names) else f"cuda:{local_rank}"
    # The only slice may be what an earlier call has left of several.
    if gpus == 1 and ("SLURM_STEP_GPUS" in env or _are_slices(names)):
        return "cuda:0"
    what = "MIG slices" if _are_slices(names) else "GPUs"
    raise ToolkitError(
        f"expected one GPU per rank, got {gpus} visible {what} for {local_size} ranks on this node",
        where="job.ranks_per_node",
        fix=f"set ranks_per_node = {gpus}, or request more GPUs with gpus_per_node",
    )
