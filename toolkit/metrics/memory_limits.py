"""The memory that remains under the limits of this process and on its node. Standard library only.

The limits are those of its job, which Slurm may enforce without cgroups, and of its cgroups, versions 1 and 2 (kernel.org, admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["memories", "requested_bytes"]

_UNLIMITED_BYTES = 1 << 60  # cgroup version 1 reports a number near 2^63 for no limit


def requested_bytes(environ: Mapping[str, str]) -> int:
    """Return the memory that the Slurm job of this process may use on its node; 0 if it has no limit or there is no job."""
    cpus, gpus = environ.get("SLURM_CPUS_ON_NODE", ""), environ.get("SLURM_GPUS_ON_NODE", "")
    for name, count in (("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", cpus), ("SLURM_MEM_PER_GPU", gpus)):
        if environ.get(name, "").isdigit() and count.isdigit():  # in MiB; --mem=0 requests the whole node
            return (int(environ[name]) << 20) * int(count)
    return 0


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
