"""Check this installation: Python and its libraries, MPI, torch, Slurm, the site, RUNS, and this host's limits.

Checks are independent: a failed check does not hide another. Checks that could crash or hang run in a child process.
"""

import errno
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.config.request import expand_path
from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.site.load import choose_site
from toolkit.site.proof import checked_in_words
from toolkit.slurm.commands import Slurm, TimedOutError, prints_commands, slurm_of_site
from toolkit.slurm.limits import cluster_settings
from toolkit.submission.preflight.storage import mount_of
from toolkit.units import format_bytes_in

__all__ = ["ERROR", "OK", "examine"]

OK, WARNING, ERROR = "ok", "warning", "error"
NEEDED, USEFUL = ("sbatch", "srun", "squeue", "scancel", "scontrol"), ("sinfo", "sacct")
OLDEST_SLURM = (22, 5)  # the oldest tested version
IMPORT_TIMEOUT_S = 120.0
MUNGE_TIMEOUT_S = 10.0
SLOW_ANSWER_S = 5.0
CLOCK_OFF_S = 2.0
FREE_BYTES = 2**30
OPEN_FILES = 4096
# Types of file systems on local disks, which other hosts do not see; /proc/filesystems does not mark them.
_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs")
_FIRST_GPU = Path("/dev/nvidia0")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\d.]+)(?P<extra>\s*;.*extra)?")
_TORCH = """
import json, torch
versions = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "nccl": None}
if versions["cuda"] and torch.distributed.is_nccl_available():
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(versions))
"""
_MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().split(chr(10))[0].strip(chr(0)), "mpi4py": mpi4py.__version__}))
"""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `level` is "ok", "warning" or "error"; `fix` is the remedy unless it is "ok"."""

    check: str
    level: str
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(runs: Path, *, site_name: str | None = None) -> Iterator[CheckResult]:
    """Run the checks, and yield each result as soon as it is available."""
    yield _python()
    yield from _libraries()
    yield _mpi()
    yield from _torch()
    try:
        detected = choose_site(site_name)
    except ToolkitError as error:
        yield CheckResult("site", ERROR, _in_words(error), error.fix)
        uses_slurm = shutil.which("sbatch") is not None
        told_by_site = ""
        slurm = Slurm(echo=prints_commands())
    else:
        yield _site(detected.site, detected.reason)
        uses_slurm = detected.site.scheduler.kind == "slurm"
        told_by_site = expand_path(detected.site, "runs", os.environ)
        slurm = slurm_of_site(detected.site.scheduler)
    if uses_slurm:
        yield from _slurm(slurm)
    is_told = bool(told_by_site) and runs.absolute().is_relative_to(told_by_site)  # the site declares it shared
    yield from _folder_of_runs(runs, asks_nodes=uses_slurm and not is_told)
    yield from _limits()


def _in_words(error: ToolkitError) -> str:
    return f"{error.where}: {error.message}" if error.where else error.message


def _python() -> CheckResult:
    return CheckResult("python", OK, f"{platform.python_version()}, {sys.executable}")


def _libraries() -> Iterator[CheckResult]:
    """Compare the installed libraries with the requirements of this package."""
    found = []
    for requirement in metadata.requires("toolkit") or ():
        match = _REQUIREMENT.match(requirement)
        if match is None or match["extra"]:
            continue
        name, wanted = match[1], match[2]
        install = f"`{sys.executable} -m pip install '{name}>={wanted}'`"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult("libraries", ERROR, f"{name} is not installed", install)
            continue
        if _numbers(version) < _numbers(wanted):
            yield CheckResult("libraries", ERROR, f"{name} {version} is older than the required {wanted}", install)
        else:
            found.append(f"{name} {version}")
    yield CheckResult("libraries", OK, ", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _mpi() -> CheckResult:
    versions, message = _ask_python(_MPI)
    if versions is None:
        fix = "load the site's MPI module, or `pip install 'toolkit[mpi]'`; jobs with one rank do not need MPI"
        return CheckResult("mpi", WARNING, f"mpi4py cannot be used: {message}", fix)
    launcher = shutil.which("mpirun")
    return CheckResult(
        "mpi", OK, f"{versions['library']}, mpi4py {versions['mpi4py']}, mpirun {launcher or 'not on PATH'}"
    )


def _torch() -> Iterator[CheckResult]:
    versions, message = _ask_python(_TORCH)
    if versions is None:
        yield CheckResult(
            "torch", WARNING, f"cannot be imported: {message}", "`pip install 'toolkit[train]'` to train with torch"
        )
        return
    if versions["cuda"] is None:
        detail, level, fix = f"{versions['version']}, without CUDA", OK, ""
        if _FIRST_GPU.exists():
            level, fix = WARNING, "install torch for CUDA: this host has an NVIDIA GPU"
    else:
        detail = f"{versions['version']}, CUDA {versions['cuda']}, NCCL {versions['nccl'] or 'missing'}, {versions['gpus']} GPUs here"
        level = OK if versions["nccl"] else WARNING
        fix = "" if versions["nccl"] else "install torch with NCCL: collectives between GPUs need it"
    yield CheckResult("torch", level, detail, fix)


def _ask_python(program: str) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON output of a Python program, or None and the reason."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, errors="replace",
            timeout=IMPORT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no result within {IMPORT_TIMEOUT_S:.0f} s"
    try:
        value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return value, ""


def _site(site: Site, reason: str) -> CheckResult:
    detail = f"{site.name} ({reason}), {checked_in_words(site)}"
    if site.scheduler.kind != "slurm" or checked_in_words(site).startswith("checked"):
        return CheckResult("site", OK, detail)
    return CheckResult("site", WARNING, detail, "run `toolkit site check` to verify the site file")


def _slurm(slurm: Slurm) -> Iterator[CheckResult]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        yield CheckResult(
            "slurm", ERROR, f"not on PATH: {', '.join(missing)}", "load Slurm's module, or install its client commands"
        )
        return
    without = [name for name in USEFUL if shutil.which(name) is None]
    if without:
        yield CheckResult(
            "slurm", WARNING, f"not on PATH: {', '.join(without)}", "install them to report ended jobs and idle nodes"
        )
    try:
        yield _version(slurm)
        yield from _controller(slurm)
    except TimedOutError as error:
        yield CheckResult(
            "controller", ERROR, error.message, "slurmctld or munged hangs: ask site support to restart it"
        )
    except ToolkitError as error:
        yield CheckResult("controller", ERROR, _in_words(error), error.fix or "ask site support")


def _version(slurm: Slurm) -> CheckResult:
    version = slurm.call(["scontrol", "--version"]).strip()
    if _numbers(version)[:2] < OLDEST_SLURM:
        return CheckResult(
            "slurm", WARNING, f"{version} is older than 22.05, the oldest tested version", "upgrade if a feature fails"
        )
    return CheckResult("slurm", OK, f"{version}, {shutil.which('sbatch')}")


def _controller(slurm: Slurm) -> Iterator[CheckResult]:
    """Query the controller. The second query also tests authentication of this user, usually by munge."""
    began = time.monotonic()
    ping = " ".join(slurm.call(["scontrol", "ping"]).split())
    slurm.call(["squeue", "--me", "--noheader"])
    taken_s = time.monotonic() - began
    if taken_s > SLOW_ANSWER_S:
        fix = "query less often: a busy controller drops requests"
        yield CheckResult("controller", WARNING, f"{ping}; responded after {taken_s:.1f} s", fix)
    else:
        yield CheckResult("controller", OK, f"{ping}; {taken_s:.2f} s")
    # Slurm commands use the munge of this host's cluster, even for a site with another cluster.
    settings = cluster_settings(replace(slurm, cluster=""))
    if settings.get("AuthType") == "auth/munge":
        yield _munge(settings)


def _munge(settings: Mapping[str, str]) -> CheckResult:
    socket = re.search(r"socket=([^,\s]+)", settings.get("AuthInfo", ""))
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return CheckResult("munge", OK, "munge commands not installed, but Slurm has accepted its credentials")
    where = ["-S", socket[1]] if socket else []
    try:
        done = subprocess.run(
            ["sh", "-c", 'munge -n "$@" | unmunge "$@"', "sh", *where], capture_output=True, text=True,
            timeout=MUNGE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return CheckResult("munge", ERROR, f"no response within {MUNGE_TIMEOUT_S:.0f} s", "restart munged on this host")
    status = re.search(r"^STATUS:\s*(.*)$", done.stdout, re.MULTILINE)
    if status is not None and status[1].startswith("Success"):
        return CheckResult("munge", OK, f"created and read a credential{f' at {socket[1]}' if socket else ''}")
    message = status[1] if status else (done.stderr.strip().splitlines() or ["no output"])[-1]
    return CheckResult("munge", ERROR, message, "start munged, and check that key and clock match the controller's")


def _folder_of_runs(runs: Path, *, asks_nodes: bool) -> Iterator[CheckResult]:
    """Check RUNS, or its first existing parent. `asks_nodes`: nodes use it, and the site does not declare it shared."""
    name = "--runs, TOOLKIT_RUNS or [paths] runs of the site"
    place = next(folder for folder in (runs, *runs.parents) if folder.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as probe:
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
            off_s = os.fstat(probe.fileno()).st_mtime - time.time()
    except OSError as error:
        room = "free disk space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        fix = f"{room}choose another folder with {name}"
        yield CheckResult("runs", ERROR, f"{place}: cannot be written: {error.strerror}", fix)
        return
    mount, free = mount_of(place), shutil.disk_usage(place).free
    kind = mount.kind if mount is not None else "unknown file system"
    detail = f"{runs}, {kind}, {format_bytes_in(free, 'GiB', digits=1)} free"
    if free < FREE_BYTES:
        yield CheckResult("runs", ERROR, f"{detail}: too little", f"free disk space, or set another folder with {name}")
    elif asks_nodes and kind in _OWN_DISKS:
        yield CheckResult(
            "runs", WARNING, f"{detail}: a local disk of this host", f"choose a shared folder with {name}"
        )
    else:
        yield CheckResult("runs", OK, detail)
    if abs(off_s) > CLOCK_OFF_S:
        fix = "synchronize this host's clock (chrony, ntpd): toolkit compares file times with it"
        yield CheckResult("clock", WARNING, f"the clock of {place} is {off_s:+.1f} s off this host's", fix)
    else:
        yield CheckResult("clock", OK, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}, matches the clock of {place}")


def _limits() -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        fix = f"`ulimit -n {OPEN_FILES}`" if most == "unlimited" or hard >= OPEN_FILES else "raise it in limits.conf"
        yield CheckResult("limits", WARNING, f"open files: {soft} (hard limit {most}); data workers need more", fix)
    else:
        yield CheckResult("limits", OK, f"open files: {'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_fabric = any(Path("/sys/class/infiniband").glob("*"))
    if locked == resource.RLIM_INFINITY:
        yield CheckResult("limits", OK, "locked memory: unlimited")
    elif has_fabric:
        fix = "run `ulimit -l unlimited`, or set PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        yield CheckResult("limits", WARNING, f"locked memory: {locked // 1024} KiB, but RDMA needs to pin more", fix)
    else:
        yield CheckResult("limits", OK, f"locked memory: {locked // 1024} KiB; enough without an RDMA device")
