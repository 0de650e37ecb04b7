"""Check that the nodes see the job files and that enough space is free, from mounts, the site file and quotas."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.submission.preflight.cluster import Cluster
from toolkit.submission.preflight.finding import About, Finding

__all__ = ["Mount", "check_room", "check_shared", "mount_of"]

# Folders that are local to each host, by convention and on most sites.
_PRIVATE = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/run")))
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_ON_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"})
_FEWEST_FILES = 1000
_LEAST_BYTES = 1 << 30
_ANOTHER = "another folder with --runs or TOOLKIT_RUNS"
_QUOTA_S = 2.0
_QUOTA_LINE = re.compile(
    r"^\s*(\S+)\s+(\d+)(\*?)\s+(\d+)\s+(\d+)\s+(?:(none|-|\d+days?|\d+:\d+)\s+)?(\d+)(\*?)\s+(\d+)\s+(\d+)(?:\s+(none))?",
    re.ASCII,
)


def check_shared(job: ResolvedJob, runs: Path, cluster: Cluster | None) -> Iterator[Finding]:
    """Return findings on paths that every node must see, but that are local to this host."""
    about = About(job, "shared")
    if cluster is not None and _is_only_node(cluster):
        return
    paths = {"RUNS": runs, "the job folder": job.job_directory, "the Python of the ranks": Path(sys.prefix)}
    told: set[Mount] = set()
    for name, path in paths.items():
        mount = mount_of(path)
        if mount is None or mount in told or _is_known_shared(job, path):
            continue
        private = next((folder for folder in _PRIVATE if path.resolve().is_relative_to(folder)), None)
        fix = "move it to a folder that all nodes see" + (", or choose one with --runs" if name == "RUNS" else "")
        if mount.kind in _IN_MEMORY or private is not None:
            where = f"in the memory of this host ({mount.kind})" if mount.kind in _IN_MEMORY else f"below {private}"
            what = f"{name} is {path}, {where}, so other hosts cannot see it"
            # If the nodes are unknown, the job may run only on this host, where a local folder is correct.
            known = cluster is not None and cluster.shapes
            yield about.refuse(str(path), what, fix) if known else about.warn(str(path), what, fix)
        elif mount.kind in _ON_DISKS:
            told.add(mount)
            yield about.note(
                str(path),
                f"{name} is on a local disk of this host ({mount.kind} at {mount.point}), which nodes see only if it is exported",
                "if it is exported, declare the folder as paths.runs in the site file",
            )


def check_room(job: ResolvedJob, runs: Path, run: RunDirectory | None = None) -> Iterator[Finding]:
    """Return findings on the free space below RUNS for the files of a run, and for checkpoints of known size."""
    about, folder = About(job, "room"), _existing(runs)
    found = os.statvfs(folder)
    if not found.f_blocks:  # a file system without storage, such as /proc
        return
    if not os.access(folder, os.W_OK | os.X_OK):  # os.access is false on a read-only mount, even for root
        told = "you have no write permission here" if folder.is_dir() else "expected a folder, got a file"
        yield about.refuse(str(folder), told, f"choose {_ANOTHER}")
        return
    free_bytes, free_files = found.f_bavail * found.f_frsize, found.f_favail
    newest = max((one for one in run.committed_checkpoints()), default=None) if run is not None else None
    expected = _size_of(newest) if newest is not None else None
    if expected is not None and free_bytes < 2 * expected:  # an older checkpoint is deleted only after the save
        yield about.refuse(
            str(folder),
            f"{_in_gb(free_bytes)} are free, but two checkpoints of {_in_gb(expected)} must fit: a save deletes the older one last",
            f"free space there, or choose {_ANOTHER}",
        )
    elif free_bytes < _LEAST_BYTES:
        say = about.warn if free_bytes else about.refuse
        yield say(str(folder), f"only {_in_gb(free_bytes)} are free", f"free space there, or choose {_ANOTHER}")
    if found.f_files and free_files < _FEWEST_FILES:
        yield about.refuse(
            str(folder), f"only {free_files} more files fit (free inodes)", f"remove files, or choose {_ANOTHER}"
        )
    yield from _quota(about, folder)


def _existing(path: Path) -> Path:
    path = path.absolute()
    # Path.exists raises if a name is too long; creating the folder reports that later.
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110


def _is_known_shared(job: ResolvedJob, path: Path) -> bool:
    """Return whether the site file states that all nodes see the folder."""
    return any(folder and path.absolute().is_relative_to(folder) for folder in (job.paths.runs, job.paths.scratch))


def _is_only_node(cluster: Cluster) -> bool:
    """Return whether this host is the only node of the cluster."""
    names: Sequence[str] = [shape.names for shape in cluster.shapes or ()]
    if len(names) != 1 or cluster.shapes is None or cluster.shapes[0].nodes != 1:
        return False
    try:
        return expand_hostlist(names[0]) == [socket.gethostname().partition(".")[0]]
    except ToolkitError:
        return False


def _size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file())


def _quota(about: About, folder: Path) -> Iterator[Finding]:
    """Return what quota(1) reports for the file system of a folder; nothing if it is not installed."""
    mount = mount_of(folder)
    if mount is None or shutil.which("quota") is None:
        return
    try:
        done = subprocess.run(["quota", "--no-wrap"], capture_output=True, text=True, timeout=_QUOTA_S, check=False)
    except subprocess.TimeoutExpired:
        yield about.note(
            str(folder), f"quota did not respond within {_QUOTA_S:.0f} s", "check your quota with your site's command"
        )
        return
    for line in done.stdout.splitlines():
        match = _QUOTA_LINE.match(line)
        if match is None or match[1] != mount.device:
            continue
        for used, over, soft, hard, grace, what in (
            (int(match[2]), match[3], int(match[4]), int(match[5]), match[6], "KiB"),
            (int(match[7]), match[8], int(match[9]), int(match[10]), match[11], "files"),
        ):
            said = f"you use {used} of {hard or soft} {what} on {mount.device}"
            if hard and used >= hard:
                yield about.refuse(str(folder), f"{said}: nothing more can be written", "remove files")
            elif over and grace == "none":
                what = f"{said}: the grace period of the soft limit ({soft}) is over: nothing more can be written"
                yield about.refuse(str(folder), what, "remove files")
            elif over:
                yield about.warn(str(folder), f"{said}: above the soft limit of {soft}", "remove files")


def _in_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """The file system of a path."""

    point: Path
    kind: str
    device: str


def mount_of(path: Path) -> Mount | None:
    """Return the file system of a path, which need not exist; None if /proc does not report it."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    held = path.resolve()
    found = None
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        point, kind_and_device = Path(_unescaped(fields.split()[4])), rest.split()
        if held.is_relative_to(point) and (found is None or point.is_relative_to(found.point)):
            found = Mount(point, kind_and_device[0], _unescaped(kind_and_device[1]))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
