"""Which launcher starts the ranks of an attempt, and its call."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import OwnFailureError
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.containers import rank_command
from toolkit.supervise.launchers import Ranks, find_mpirun, launch_local, launch_mpirun, launch_srun
from toolkit.supervise.log import say
from toolkit.supervise.shape import Shape
from toolkit.supervise.symptoms import PMIX_ORDER


def is_unmanaged(entry: object) -> bool:
    """True for scripts and executables, which have none of toolkit's handlers; false for `file.py:main`."""
    return not (isinstance(entry, str) and ":" in entry)


def choose_launcher(job: Mapping[str, Any], allocation: Allocation, shape: Shape) -> str:
    """The site's launcher; `auto` is srun inside Slurm, else mpirun if it is installed, else local."""
    kind = str(job["launcher"].get("kind") or "auto")
    if kind == "srun" and not allocation.in_slurm:
        kind = "auto"
    if kind != "auto":
        return kind
    if allocation.in_slurm:
        return "srun"
    if find_mpirun(str(job["launcher"].get("mpirun") or ""), os.environ):
        return "mpirun"
    say("mpirun not found: starting the ranks one by one, without MPI")
    return "local"


def launch(
    kind: str, job: Mapping[str, Any], shape: Shape, environment: Mapping[str, str], attempt: AttemptDirectory, *,
    python: str = sys.executable, nodes: Sequence[str] = (),
) -> Ranks:  # fmt: skip
    """Start the ranks of one attempt, with `python` as interpreter if the job has no image.

    `nodes` are those of a heterogeneous job, component by component.
    """
    table = job["launcher"]
    run = RunDirectory(attempt.path.parents[1])
    command = rank_command(job, run, environment, os.environ, launcher=kind, python=python)
    options = [*(str(option) for option in table.get("options") or []), *command.options]
    if kind == "srun":
        mpi = _mpi_over(nodes, job)
        return launch_srun(shape, command.environment, attempt, command.program, mpi=mpi, options=options)
    if kind == "mpirun":
        program = str(table.get("mpirun") or "")
        return launch_mpirun(shape, command.environment, attempt, command.program, program=program, options=options)
    return launch_local(shape, command.environment, attempt, command.program)


def _mpi_over(nodes: Sequence[str], job: Mapping[str, Any]) -> str:
    """The site's --mpi; `none` if no MPI could start with it and none of the ranks needs one.

    Slurm's PMIx and pmi2 number the nodes of a step by their sorted names, and a heterogeneous job's ranks component by
    component (22.05). If these orders differ, MPI_Init fails with PMIx and never returns with pmi2.

    Raises:
        OwnFailureError: the ranks are an unmanaged program, and would wait forever.
    """
    mpi = str(job["launcher"].get("mpi") or "")
    are_sorted = list(nodes) == sorted(nodes, key=_as_slurm_sorts)
    if are_sorted or not mpi.startswith("pmi"):
        return mpi
    unsorted = f"the components' nodes ({', '.join(nodes)}) are not in the order of their names"
    if not is_unmanaged(job["job"]["entry"]):
        say(f"{unsorted}, so the ranks start without {'PMIx' if mpi.startswith('pmix') else mpi}")
        return "none"
    if not mpi.startswith("pmix"):
        raise OwnFailureError(f"{unsorted}: with {mpi}, MPI_Init would never return", fix=PMIX_ORDER.fix)
    return mpi


def _as_slurm_sorts(node: str) -> list[tuple[int, str]]:
    """A sort key that puts node2 before node10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"([0-9]+)", node)]
