"""Check once a minute for signs that this rank's node or GPU may soon fail, so that ranks can save in time.

Memory: the free memory under the limits of this process's cgroups, or on the node. GPU: NVML's counts of uncorrectable memory errors
and of pending row remappings. Each sign is reported once per attempt.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolkit.metrics.memory_limits import memories

__all__ = ["HealthWatch"]

PERIOD_S = 60.0
LEAST_FREE = 0.03  # fraction of the limit; below it, the kernel may soon kill a process, and a save also needs memory


class HealthWatch:
    """Checks the signs of failure for one rank.

    Args:
        gpu: UUID of the rank's GPU for NVML ("GPU-..."), "" for a CPU or another vendor's GPU.
        memory: also check the node's memory, on one rank per node.
        root: the folder that contains proc and sys.
    """

    def __init__(self, gpu: str = "", *, memory: bool = True, root: Path = Path("/")) -> None:
        self._signs: list[Callable[[], str]] = []
        if memory:
            self._signs.append(lambda: low_memory(root))
        if gpu:
            self._signs.append(GpuErrors(gpu).look)
        self._looked_at = float("-inf")

    def look(self) -> str:
        """Return new signs since the last check, or ""; checks at most once a minute."""
        now = time.monotonic()
        if now - self._looked_at < PERIOD_S:
            return ""
        self._looked_at = now
        found = [(sign, said) for sign in self._signs if (said := sign())]
        for sign, _ in found:
            self._signs.remove(sign)
        return "; ".join(said for _, said in found)


def low_memory(root: Path = Path("/")) -> str:
    """Return a message if a memory limit is nearly reached, else ""."""
    for what, free, limit in memories(root):
        if free < LEAST_FREE * limit:
            return f"{what} has {free >> 20} of {limit >> 20} MiB of memory left"
    return ""


class GpuErrors:
    """Reports new memory errors of a GPU since construction; `uuid` is the UUID from NVML."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._before = gpu_counts(uuid)

    def look(self) -> str:
        """Return new errors, or ""."""
        now = gpu_counts(self._uuid)
        new = [
            f"{now[name] - before} {name}" for name, before in self._before.items() if now.get(name, before) > before
        ]
        return f"{self._uuid}: {', '.join(new)} since the attempt began" if new else ""


def gpu_counts(uuid: str) -> dict[str, int]:
    """Return counters that often increase before a GPU fails. Empty without NVML; missing counters are omitted."""
    try:
        import pynvml
    except ModuleNotFoundError:  # a container without NVML
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no NVIDIA driver
        return {}
    try:
        found = {}
        with suppress(pynvml.NVMLError):  # a GPU without ECC, or a MIG device
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            found["uncorrectable memory errors"] = int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
            _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
            found["row remappings pending"], found["row remappings failed"] = int(pending), int(failed)
        return found
    finally:
        pynvml.nvmlShutdown()
