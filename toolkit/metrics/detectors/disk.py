"""A file system of the run directory without free space: `disk_pressure`.

The supervisor judges it while a run is active, and so do commands on the login node: on a full file system, the supervisor
cannot write a verdict.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import DiskSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict
from toolkit.rundir.files import why_full, why_unwritable
from toolkit.units import format_bytes_in

__all__ = ["DiskDetector", "disk_sample", "with_disk"]


def disk_sample(folder: Path, *, writes: bool = False) -> DiskSample:
    """Return the state of the file system of a folder. Only if it `writes` a file there does it notice a quota.

    Raises:
        OSError: the file system does not respond.
    """
    space = os.statvfs(folder)
    inodes = space.f_favail / space.f_files if space.f_files else 1.0  # some file systems have no fixed number
    full = "no space left" if why_full(folder) else why_unwritable(folder) if writes else ""
    return DiskSample(
        time.time(), str(folder), space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize, inodes, full
    )


class DiskDetector:
    """Judges the newest sample."""

    clear_after = 3

    def observe(self, sample: DiskSample) -> list[Verdict]:
        is_low = sample.free_bytes < min(limit("disk.free") * sample.total_bytes, limit("disk.bytes"))
        if not (sample.full or is_low or sample.free_inodes < limit("disk.inodes")):
            return []
        free, whole = (format_bytes_in(size, "GiB", digits=2) for size in (sample.free_bytes, sample.total_bytes))
        what = f"full ({sample.full})" if sample.full else "nearly full"
        return [
            raise_verdict(
                VerdictKind.DISK, Severity.CRITICAL if sample.full else Severity.WARNING,
                f"the file system of the run directory is {what}: {free} of {whole} and {100 * sample.free_inodes:.0f} % of the "
                f"inodes are free, so {'saves fail' if sample.full else 'the next save may fail'}",
                f"free space before the next save: `df -h {sample.path}`, `toolkit gc`", device="runs",
                cause="full" if sample.full else "nearly_full", time_s=sample.time_s,
                evidence={"free_bytes": sample.free_bytes, "total_bytes": sample.total_bytes, "free_inodes": sample.free_inodes},
            )
        ]  # fmt: skip


def with_disk(raised: Iterable[Verdict], folder: Path) -> list[Verdict]:
    """Return the raised verdicts of a running attempt, with what this node sees of its file system."""
    found = list(raised)
    try:
        own = DiskDetector().observe(disk_sample(folder))
    except OSError:  # reading the run reports it
        return found
    is_worse = own and all(
        one.kind is not VerdictKind.DISK or one.severity.order < own[0].severity.order for one in found
    )
    rest = [one for one in found if one.kind is not VerdictKind.DISK] if is_worse else found
    return sorted([*rest, *own], key=lambda one: (-one.severity.order, -one.cost_s_per_hour)) if is_worse else rest
