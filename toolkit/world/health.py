"""Check once a minute for signs that this rank's node or GPU may soon fail, so that ranks can save in time.

Memory: the free memory under the limits of this process's cgroups (versions 1 and 2: kernel.org,
admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst), or on the node. GPU: NVML's counts of uncorrectable memory errors
and of pending row remappings. Each sign is reported once per attempt.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["HealthWatch", "memories"]

PERIOD_S = 60.0
LEAST_FREE = 0.03  # fraction of the limit; below it, the kernel may soon kill a process, and a save also needs memory
_UNLIMITED_BYTES = 1 << 60  # cgroup version 1 reports a number near 2^63 for no limit


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


def memories(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, free bytes, limit in bytes) for the cgroups that contain this process and for the node."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            yield from _limits(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    sizes = _numbers(root / "proc/meminfo")
    if "MemTotal:" in sizes and "MemAvailable:" in sizes:
        yield "the node", sizes["MemAvailable:"] << 10, sizes["MemTotal:"] << 10


def _limits(mount: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Yield the limits at all levels, because Slurm limits the job and often not the step.

    In a container, the path may be a path of the host, and the top folder is the container's own cgroup.
    """
    inside = mount / path.lstrip("/")
    for folder in [inside, *inside.parents]:
        if folder.is_relative_to(mount):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None and 0 < most < _UNLIMITED_BYTES:
                counts = _numbers(folder / "memory.stat")
                cached = sum(counts.get(f"{prefix}{kind}", 0) for kind in ("active_file", "inactive_file"))
                yield f"the cgroup /{folder.relative_to(mount)}".removesuffix("."), most - now + cached, most


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


def _lines(path: Path) -> list[str]:
    """Return the lines of a kernel file; [] if it does not exist, for example for an unused controller."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the single number in a file; None if it contains text ("max") or does not exist."""
    text = " ".join(_lines(path))
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers by name from `name number` lines, as in memory.stat and meminfo."""
    words = [line.split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
