"""Stage the ranks' Python environment on the nodes' disks: pack it once, broadcast it at each start, then remove it.

A virtual environment can be moved: Python finds `pyvenv.cfg` next to the `bin` that it was started from, and that file
names the base Python, which stays on the shared file system (docs.python.org/3.11/library/site.html). Packages that are
installed in editable form stay there, too, and scripts in `bin` keep the interpreter of their first line.
"""

import hashlib
import os
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import OwnFailureError
from toolkit.rundir.bad_nodes import runs_of
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.commands import run_command
from toolkit.supervise.launchers import srun_on_every_node
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

STEP_S = 600.0  # timeout of the broadcast, and again of the unpacking
UNSTAGE_S = 60.0
LAST_S = 30.0  # reserved at the end of an allocation for the requeue: Slurm may respond slowly
ASKED_TO_END_S = 5.0  # to remove a partial copy after a stop request: Slurm may soon send SIGKILL
KEPT_S = 7 * 86400.0  # archives that no start has used for this long are removed

# Shell scripts for each node. Other users can predict the name of the folder ($1), so _MAKE uses only a folder that it
# creates itself. Before that, it removes the folders of earlier starts of this job ($2*) that belong to the user.
_MAKE = """\
mkdir -p -- "${1%/*}" || exit
if [ -n "$(find -L "${1%/*}" -prune -perm -0002 ! -perm -1000)" ]; then
    echo "${1%/*} is writable by everyone and has no sticky bit" >&2; exit 1
fi
for old in "$2"*; do
    if [ -O "$old" ] && [ ! -L "$old" ]; then rm -rf -- "$old"; fi
done
if [ -e "$1" ] || [ -L "$1" ]; then echo "$1 already exists, and belongs to another user" >&2; exit 1; fi
mkdir -m 700 -- "$1"
"""
_UNPACK = 'umask 077 && tar --no-same-permissions --no-same-owner -xf "$2" -C "$1" && rm -f -- "$1/.environment.tar"'
_REMOVE = 'if [ -O "$1" ] && [ ! -L "$1" ]; then rm -rf -- "$1"; fi'


@dataclass(frozen=True)
class Staged:
    """An environment on the nodes' disks. `folder` is the same path on every node."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def stage(
    run: RunDirectory, job: Mapping[str, Any], allocation: Allocation, environ: Mapping[str, str],
    request: StopRequest,
) -> Staged | None:  # fmt: skip
    """Copy the environment that `env.stage` names to the local disk of every node; None if it names none.

    Raises:
        OwnFailureError: it is not a virtual environment, the site has no local disk, a node could not store it, or a
        stop was requested.
    """
    chosen = (job.get("env") or {}).get("stage") or False
    if not chosen:
        return None
    if not allocation.in_slurm:
        say("env.stage: nothing is staged, because the ranks run on this host")
        return None
    source = _environment_at(Path(sys.prefix if chosen is True else str(chosen)).expanduser())
    scratch = _disk_of_nodes(job)
    began = time.monotonic()
    archive = pack(source, runs_of(run) / ".environments", request)
    packed = time.monotonic()
    of_job = scratch / f"toolkit-env-{allocation.job_id}-"
    # The number of requeues distinguishes it from the folder of a superseded start that is still running.
    folder = Path(f"{of_job}{allocation.restarts}-{archive.stem[:16]}")
    _spread(archive, folder, of_job, allocation, environ, request)
    say(
        f"staged {source} ({archive.stat().st_size >> 20} MiB) to {folder} on {allocation.nodes} nodes: "
        f"packed in {packed - began:.1f} s, copied in {time.monotonic() - packed:.1f} s"
    )
    return Staged(folder)


def _environment_at(source: Path) -> Path:
    if not (source / "pyvenv.cfg").is_file():
        raise OwnFailureError(
            f"{source} is not a virtual environment: pyvenv.cfg not found",
            where="env.stage",
            fix="create a virtual environment with `python -m venv`, or remove env.stage",
        )
    return source


def _disk_of_nodes(job: Mapping[str, Any]) -> Path:
    scratch = os.path.expandvars(str((job.get("paths") or {}).get("local_scratch") or ""))
    if not scratch.startswith("/"):
        raise OwnFailureError(
            f"expected an absolute path of a local disk in paths.local_scratch of the site, got {scratch!r}",
            where="env.stage",
            fix="set local_scratch in the site file, or remove env.stage",
        )
    return Path(scratch)


def unstage(staged: Staged, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Remove a staged environment from every node; log a failure.

    Skipped if the rest of the allocation is needed to request the next start.
    """
    problem = _remove(staged.folder, allocation, environ, timeout_s=UNSTAGE_S)
    if problem:
        say(f"{staged.folder} was not removed from every node: {problem}")


def unstage_here(staged: Staged) -> None:
    """Remove a staged environment from this node only: the others belong to the start that took over the run."""
    try:
        shutil.rmtree(staged.folder)
    except OSError as error:
        say(f"{staged.folder} was not removed: {error.strerror}")


def pack(source: Path, cache: Path, request: StopRequest) -> Path:
    """Return the archive of an environment, packed unless it is cached. Its name is the digest of the environment.

    The digest covers names, sizes and times of all files, not their contents: there are tens of thousands.

    Raises:
        OwnFailureError: the environment cannot be packed, or a stop was requested.
    """
    try:
        cache.mkdir(mode=0o700, exist_ok=True)
        archive = cache / f"{digest_of(source)}.tar"
        if not archive.exists():
            _remove_old(cache)
            _write_archive(source, archive, request)
        os.utime(archive)
    except OSError as error:
        raise OwnFailureError(
            f"cannot pack {source}: {error.strerror}", where=str(error.filename or cache), fix="remove env.stage"
        ) from error
    return archive


def _remove_old(cache: Path) -> None:
    for old in cache.glob("*.tar*"):
        with suppress(FileNotFoundError):  # another start has removed the file
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()


def _write_archive(source: Path, archive: Path, request: StopRequest) -> None:
    def go_on(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if request.came:
            raise OwnFailureError(f"packing {source} was aborted because a stop was requested")
        return member

    draft = archive.with_name(f"{archive.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with tarfile.open(draft, "w") as stream:
            stream.add(source, arcname=".", filter=go_on)
        draft.rename(archive)
    finally:
        draft.unlink(missing_ok=True)


def digest_of(source: Path) -> str:
    """Return a digest of the names, sizes, times and link targets below a folder."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118  pathlib is slow for tens of thousands of files
            facts = os.lstat(path)
            link = os.readlink(path) if os.path.islink(path) else ""  # noqa: PTH114, PTH115
            digest.update(
                f"{os.path.relpath(path, source)}\0{facts.st_size}\0{facts.st_mtime_ns}\0{link}\0".encode(
                    errors="surrogateescape"
                )
            )
    return digest.hexdigest()


def _spread(
    archive: Path, folder: Path, of_job: Path, allocation: Allocation, environ: Mapping[str, str],
    request: StopRequest,
) -> None:  # fmt: skip
    """Create the folder on every node and unpack the archive into it. If one node fails, remove it from all nodes."""

    def on_every_node(program: str, *arguments: Path) -> str:
        command = ["sh", "-c", program, "stage", *map(str, arguments)]
        return _on_every_node(command, allocation, environ, request, timeout_s=STEP_S)

    problem = on_every_node(_MAKE, folder, of_job)
    source = archive  # every node reads it from the shared disk, unless Slurm broadcasts it
    if not problem and shutil.which("sbcast", path=environ.get("PATH")):
        source = folder / ".environment.tar"
        argv = ["sbcast", "--force", str(archive), str(source)]
        problem = run_command(argv, environ, timeout_s=STEP_S, request=request).problem
    problem = problem or on_every_node(_UNPACK, folder, source)
    if problem:
        left = _remove(folder, allocation, environ, timeout_s=ASKED_TO_END_S if request.came else UNSTAGE_S)
        raise OwnFailureError(
            f"cannot copy the environment to every node: {problem}"
            + (f"; a partial copy remains: {left}" if left else ""),
            where=str(folder),
            fix="check the files and the free space in this folder on the nodes, or remove env.stage",
        )


def _remove(folder: Path, allocation: Allocation, environ: Mapping[str, str], *, timeout_s: float) -> str:
    """Remove the user's folder from every node; return "" or the problem."""
    timeout_s = min(timeout_s, allocation.left_s() - LAST_S)
    if timeout_s < 1:
        return f"only {allocation.left_s():.0f} s of the allocation are left"
    # A stop of this start must not stop the removal, so this step gets its own StopRequest.
    remove = ["sh", "-c", _REMOVE, "remove", str(folder)]
    return _on_every_node(remove, allocation, environ, StopRequest(), timeout_s=timeout_s)


def _on_every_node(
    command: Sequence[str], allocation: Allocation, environ: Mapping[str, str], request: StopRequest, *, timeout_s: float
) -> str:  # fmt: skip
    """Run a command once on each node; return "" or the problem."""
    argv = srun_on_every_node(allocation.nodes_of_components, command)
    return run_command(argv, environ, timeout_s=timeout_s, request=request).problem
