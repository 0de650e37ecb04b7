"""Which device a rank uses, found without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolkit.errors import ToolkitError


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs this process may use: those that NVML counts, cut to CUDA_VISIBLE_DEVICES; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return count
    return min(
        count, len([name for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    )


def choose_device(local_rank: int, local_size: int, environ: Mapping[str, str] | None = None) -> str:
    """ "cuda:<i>" for a rank of its own GPU, "cuda:0" where Slurm shows each task just its one, else "cpu"."""
    gpus = visible_gpus(os.environ if environ is None else environ)
    if gpus == 0:
        return "cpu"
    if gpus >= local_size:
        return f"cuda:{local_rank}"
    if gpus == 1 and "SLURM_STEP_GPUS" in (environ or os.environ):
        return "cuda:0"
    raise ToolkitError(
        f"{local_size} ranks on this node share {gpus} visible GPUs",
        where="job.ranks_per_node",
        fix=f"set ranks_per_node = {gpus}, or ask for more GPUs with gpus_per_node",
    )
