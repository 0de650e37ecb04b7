"""Choose the device of a rank, without torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import ToolkitError

__all__ = ["visible_gpus"]

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU, created by the NVIDIA driver
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # one folder per device of the AMD driver


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that this process may use: those that the driver reports and the environment allows."""
    nvidia = _listed(_nvidia_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    return nvidia or _listed(_amd_gpus(), environ.get("ROCR_VISIBLE_DEVICES"))


def _listed(count: int, names: str | None) -> int:
    if names is None:
        return count
    return min(count, len([name for name in names.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]))


def _nvidia_gpus() -> int:
    """Return the number of GPUs from NVML; 0 without an NVIDIA driver."""
    try:
        import pynvml
    except ModuleNotFoundError:  # a container without NVML; this folder does not list MIG devices
        return sum(1 for _ in _NVIDIA_GPUS.glob("*"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
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
    """Return "cuda:<i>" for a rank with its own GPU, "cuda:0" if Slurm shows each task only its own, else "cpu"."""
    gpus = visible_gpus(os.environ if environ is None else environ)
    if gpus == 0:
        return "cpu"
    if gpus >= local_size:
        return f"cuda:{local_rank}"
    if gpus == 1 and "SLURM_STEP_GPUS" in (environ or os.environ):
        return "cuda:0"
    raise ToolkitError(
        f"expected one GPU per rank, got {gpus} visible GPUs for {local_size} ranks on this node",
        where="job.ranks_per_node",
        fix=f"set ranks_per_node = {gpus}, or request more GPUs with gpus_per_node",
    )
