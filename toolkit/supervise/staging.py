"""The ranks' Python environment on the nodes' own disks: packed once, broadcast at each start, removed at its end.

A virtual environment can be moved: Python finds `pyvenv.cfg` beside the `bin` that it was started from, and that file
names the Python underneath, which stays where it is (docs.python.org/3.11/library/site.html). What is installed in
editable form stays on the shared file system, too, and scripts in `bin` keep the interpreter of their first line.
"""

from __future__ import annotations

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
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

STEP_S = 600.0  # for the broadcast, and for the unpacking
UNSTAGE_S = 60.0
KEPT_S = 7 * 86400.0  # archives that no start has used for so long are removed


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
    """Bring the environment that `env.stage` names to the disk of every node; None where none is named.

    Raises:
        OwnFailureError: it is no virtual environment, the site has no local disk, a node could not take it, or the
            start is asked to end.
    """
    chosen = (job.get("env") or {}).get("stage") or False
    if not chosen:
        return None
    if not allocation.in_slurm:
        say("env.stage: the ranks run on this machine, so nothing is staged")
        return None
    source = Path(sys.prefix if chosen is True else str(chosen)).expanduser()
    scratch = os.path.expandvars(str((job.get("paths") or {}).get("local_scratch") or ""))
    if not (source / "pyvenv.cfg").is_file():
        raise OwnFailureError(
            f"{source} is no virtual environment: it has no pyvenv.cfg",
            where="env.stage",
            fix="make one with `python -m venv`, or leave env.stage out",
        )
    if not scratch.startswith("/"):
        raise OwnFailureError(
            f"the site names no disk of the nodes (paths.local_scratch is {scratch!r})",
            where="env.stage",
            fix="write local_scratch into the site file, or leave env.stage out",
        )
    began = time.monotonic()
    archive = pack(source, runs_of(run) / ".environments", request)
    packed = time.monotonic()
    folder = Path(scratch) / f"toolkit-env-{allocation.job_id}-{archive.stem[:16]}"
    _spread(archive, folder, allocation, environ, request)
    say(
        f"staged {source} ({archive.stat().st_size >> 20} MiB) to {folder} of {allocation.nodes} nodes: "
        f"packed in {packed - began:.1f} s, spread in {time.monotonic() - packed:.1f} s"
    )
    return Staged(folder)


def unstage(staged: Staged, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Remove a staged environment from every node; a node that does not answer keeps it, and this is said."""
    remove = ["rm", "-rf", str(staged.folder)]
    # What was asked of this start is why it ends: a request of its own lets the step go on.
    problem = _on_every_node(remove, allocation, environ, StopRequest(), timeout_s=UNSTAGE_S)
    if problem:
        say(f"{staged.folder} was not removed everywhere: {problem}")


def pack(source: Path, cache: Path, request: StopRequest) -> Path:
    """The archive of an environment, made unless the cache has it; its name is the digest of what it holds.

    The digest covers names, sizes and times of all files, not their contents: these are tens of thousands.

    Raises:
        OwnFailureError: it cannot be packed, or the start is asked to end.
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
            f"cannot pack {source}: {error.strerror}", where=str(error.filename or cache), fix="leave env.stage out"
        ) from error
    return archive


def _remove_old(cache: Path) -> None:
    for old in cache.glob("*.tar*"):
        with suppress(FileNotFoundError):  # another start has removed it
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()


def _write_archive(source: Path, archive: Path, request: StopRequest) -> None:
    def go_on(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if request.came:
            raise OwnFailureError(f"packing {source} was given up, since this start is asked to end")
        return member

    draft = archive.with_name(f"{archive.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with tarfile.open(draft, "w") as stream:
            stream.add(source, arcname=".", filter=go_on)
        draft.rename(archive)
    finally:
        draft.unlink(missing_ok=True)


def digest_of(source: Path) -> str:
    """A digest of the names, sizes, times and link targets below a folder."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118  tens of thousands of them
            facts = os.lstat(path)
            link = os.readlink(path) if os.path.islink(path) else ""  # noqa: PTH114, PTH115
            digest.update(
                f"{os.path.relpath(path, source)}\0{facts.st_size}\0{facts.st_mtime_ns}\0{link}\0".encode(
                    errors="surrogateescape"
                )
            )
    return digest.hexdigest()


def _spread(
    archive: Path, folder: Path, allocation: Allocation, environ: Mapping[str, str], request: StopRequest
) -> None:
    """Send the archive along Slurm's tree where there is sbcast; else every node reads it from the shared disk."""
    local = Path(f"{folder}.tar")
    if shutil.which("sbcast", path=environ.get("PATH")):
        argv = ["sbcast", "--force", str(archive), str(local)]
        problem = run_command(argv, environ, timeout_s=STEP_S, request=request).problem
        source = local
    else:
        problem, source = "", archive
    if not problem:
        script = 'mkdir -m 700 -p "$1" && tar -xf "$2" -C "$1" && rm -f "$3"'
        unpack = ["sh", "-c", script, "unpack", str(folder), str(source), str(local)]
        problem = _on_every_node(unpack, allocation, environ, request, timeout_s=STEP_S)
    if problem:
        raise OwnFailureError(
            f"the environment did not reach every node: {problem}",
            where=str(folder),
            fix="look at the free space there, or leave env.stage out",
        )


def _on_every_node(
    command: Sequence[str], allocation: Allocation, environ: Mapping[str, str], request: StopRequest, *, timeout_s: float
) -> str:  # fmt: skip
    """Run a command once on each node; "" or what went wrong."""
    argv = [
        "srun", f"--nodes={allocation.nodes}", f"--ntasks={allocation.nodes}", "--ntasks-per-node=1", "--mpi=none",
        "--input=none", *command,
    ]  # fmt: skip
    return run_command(argv, environ, timeout_s=timeout_s, request=request).problem
