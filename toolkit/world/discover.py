"""Find the rank of this process and the number of ranks from MPI, Slurm or torchrun, and compare these sources."""

import ctypes
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.terminal.talk import say
from toolkit.world.device import choose_device, own_slice
from toolkit.world.facts import World
from toolkit.world.stop import StopWatch

__all__ = ["Place", "discover", "from_slurm", "in_slurm_step"]

OPEN_MPI_LIBRARY = "libmpi.so.40"  # the soname of Open MPI 4 and 5


def launched_by_pmix(environ: Mapping[str, str]) -> bool:
    """Return True under `srun --mpi=pmix` and Open MPI's mpirun, which both use PMIx."""
    return "PMIX_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ


def pin_library() -> bool:
    """Set the MPI library that mpi4py loads in this process; return False if none is compatible with the launcher.

    Under PMIx, toolkit selects Open MPI if the dynamic linker finds it. The `mpich` wheel supports only Hydra's PMI and
    would kill the process, so it is never used there. In all other cases, mpi4py's own search is correct.

    On busy nodes with one rank each, Slurm lets some ranks leave both barriers of Open MPI 4's MPI_Init while another one
    still waits in the first. Their first message reaches that rank before it can receive any, and kills it by SIGSEGV. With
    this variable, MPI_Init waits only at its end, when a rank can receive. Ranks of one node need the first barrier.
    """
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if launched_by_pmix(os.environ) and tasks and {*expand_tasks_per_node(tasks)} == {1}:
        os.environ.setdefault("OMPI_MCA_pmix_base_async_modex", "1")
    if os.environ.get("MPI4PY_LIBMPI") or not launched_by_pmix(os.environ):
        return True
    try:
        ctypes.CDLL(OPEN_MPI_LIBRARY, mode=ctypes.RTLD_LOCAL)
    except OSError:  # no Open MPI on the linker's path
        return not _wheel_installed("mpich")
    os.environ["MPI4PY_LIBMPI"] = OPEN_MPI_LIBRARY
    return True


def check_library(environ: Mapping[str, str]) -> None:
    """Reject Open MPI in an srun step without PMIx, because it would print a page of errors and exit.

    Raises:
        ToolkitError: this step lacks PMIx; the fix names a suitable `--mpi`.
    """
    library = environ.get("MPI4PY_LIBMPI", "")
    in_step = "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", "").isdigit()
    if in_step and library.endswith(OPEN_MPI_LIBRARY) and "PMI_RANK" in environ and not launched_by_pmix(environ):
        raise ToolkitError(
            "srun uses PMI-2, but Open MPI requires PMIx: every process would be rank 0 of 1",
            where=socket.gethostname(),
            fix='set launcher_options = ["--mpi=pmix"] in [job], or launcher.mpi = "pmix" in the site file (`srun --mpi=list` lists '
            "the choices)",
        )


def _wheel_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# Variables that MPI process managers set for their ranks.
_MPI_SIGNS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Place:
    """The rank, node and sizes of a process, according to one source."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    launcher: str
    source: str


def discover(environ: Mapping[str, str] | None = None) -> World:
    """Return the World of this process, which was started by toolkit, srun, mpirun, torchrun or directly.

    Raises:
        ToolkitError: the sources contradict each other, such as MPI with 1 rank in a job with 8.
    """
    env = os.environ if environ is None else environ
    place = _place(env)
    expected = env.get("TOOLKIT_WORLD_SIZE")
    if expected and int(expected) != place.size:
        raise _wrong_size(place, int(expected), "the job")
    run = RunDirectory(Path(env["TOOLKIT_RUN_DIR"])) if env.get("TOOLKIT_RUN_DIR") else None
    attempt = int(env.get("TOOLKIT_ATTEMPT") or 0)
    attempt_directory: AttemptDirectory | None = run.attempt(attempt) if run else None
    device = choose_device(place.local_rank, place.local_size, env)
    if env is os.environ and (own := own_slice(place.local_rank, env)):
        os.environ["CUDA_VISIBLE_DEVICES"] = own
    return World(
        rank=place.rank, local_rank=place.local_rank, size=place.size, local_size=place.local_size,
        node=place.node, nodes=place.nodes, host=socket.gethostname(), device=device, launcher=place.launcher,
        discovered_by=place.source, attempt=attempt, run_dir=run.path if run else None,
        stop_watch=StopWatch(run, attempt_directory), halvings=int(env.get("TOOLKIT_HALVINGS") or 0),
    )  # fmt: skip


def _place(env: Mapping[str, str]) -> Place:
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env:  # torchrun itself may run in a Slurm step
        return from_torchrun(env)
    if env.get("TOOLKIT_LAUNCHER") == "local":
        return from_torchrun(env, launcher="local", source="toolkit's local launcher")
    if any(name in env for name in _MPI_SIGNS):
        check_library(env)
        if pin_library():
            return from_mpi(env)
        if not in_slurm_step(env):
            raise ToolkitError(
                "the launcher uses PMIx, but the only MPI library here, the mpich wheel, does not support it",
                where=socket.gethostname(),
                fix="use the mpirun in the folder of this Python, or set MPI4PY_LIBMPI to the launcher's libmpi.so",
            )
        if env["SLURM_PROCID"] == "0":
            say("no MPI library here supports PMIx; toolkit uses Slurm's variables")
    if in_slurm_step(env):
        return from_slurm(env)
    if "RANK" in env and "WORLD_SIZE" in env:
        return from_torchrun(env, source="RANK and WORLD_SIZE")
    return Place(0, 1, 0, 1, 0, 1, "none", "no launcher: a single process")


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Return True in a task of srun. Batch scripts and the shell of salloc have SLURM_PROCID, but are not tasks."""
    return env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def from_torchrun(env: Mapping[str, str], *, launcher: str = "torchrun", source: str = "torchrun's variables") -> Place:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK."""
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE", size))
    node = int(env.get("GROUP_RANK", rank // local_size))
    local_rank = int(env.get("LOCAL_RANK", rank % local_size))
    return Place(rank, size, local_rank, local_size, node, -(-size // local_size), launcher, source)


def from_slurm(env: Mapping[str, str]) -> Place:
    """Read the variables that srun sets for each task."""
    per_node = expand_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    node = int(env["SLURM_NODEID"])
    # In a heterogeneous job, SLURM_NODEID counts component by component, but the task counts are in node name order.
    of_components = int(env.get("SLURM_HET_SIZE") or 1) > 1
    local_size = len(env["SLURM_GTIDS"].split(",")) if of_components else per_node[node]
    return Place(
        int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"]), local_size, node,
        len(per_node), "srun", f"Slurm step {env.get('SLURM_JOB_ID', '?')}.{env['SLURM_STEP_ID']}",
    )  # fmt: skip


def expand_tasks_per_node(text: str) -> list[int]:
    """Return Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ToolkitError(
                f"{text!r} is not a valid list of tasks per node",
                where="SLURM_STEP_TASKS_PER_NODE",
                fix="keep the value that srun sets, such as 2(x3),1",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def from_mpi(env: Mapping[str, str]) -> Place:
    """Query MPI, and compare its number of ranks with the launcher's variables."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ToolkitError(
            f"an MPI launcher started this process, but mpi4py cannot load an MPI library: {error}",
            where=socket.gethostname(),
            fix="set MPI4PY_LIBMPI (site file: launcher.libmpi) to the libmpi.so of the launcher's MPI",
        ) from error
    communicator = MPI.COMM_WORLD
    rank, size = communicator.Get_rank(), communicator.Get_size()
    launcher = "srun" if in_slurm_step(env) and "OMPI_MCA_ess_base_jobid" not in env else "mpirun"
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].replace("\t", " ")
    announced = _announced_size(env, launcher)
    source = f"MPI ({' '.join(library.split())[:60]})"
    if announced is not None and announced != size:
        raise _wrong_size(Place(rank, size, 0, 1, 0, 1, launcher, source), announced, "the launcher")
    local_rank, local_size, node, nodes = _nodes_by_host(communicator)
    return Place(rank, size, local_rank, local_size, node, nodes, launcher, source)


def _announced_size(env: Mapping[str, str], launcher: str) -> int | None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(("SLURM_STEP_NUM_TASKS",) if launcher == "srun" else ())):
        if env.get(name, "").isdigit():
            return int(env[name])
    return None


def _nodes_by_host(communicator: Any) -> tuple[int, int, int, int]:
    """Return (local rank, local size, node, nodes); nodes are numbered by their lowest rank."""
    width = 256
    mine = bytearray(socket.gethostname().encode()[:width].ljust(width, b"\0"))
    everybody = bytearray(width * communicator.Get_size())
    communicator.Allgather(mine, everybody)
    hosts = [bytes(everybody[at : at + width]) for at in range(0, len(everybody), width)]
    order = list(dict.fromkeys(hosts))
    host, rank = bytes(mine), communicator.Get_rank()
    return hosts[:rank].count(host), hosts.count(host), order.index(host), len(order)


def _wrong_size(place: Place, expected: int, who: str) -> ToolkitError:
    return ToolkitError(
        f"{place.source} reports {place.size} rank{'s' * (place.size != 1)}, but {who} has {expected}: "
        "the MPI library does not support the launcher's process management interface",
        where=socket.gethostname(),
        fix='set launcher_options = ["--mpi=TYPE"] in [job], or launcher.mpi in the site file, to the type that this MPI was '
        "built for (`srun --mpi=list`), "
        "or set launcher.libmpi / MPI4PY_LIBMPI to the MPI that belongs to the launcher",
    )
