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


def is_foreign(entry: object) -> bool:
    """True for scripts and executables, which have none of our handlers; false for `file.py:main`."""
    return not (isinstance(entry, str) and ":" in entry)


def choose_launcher(job: Mapping[str, Any], allocation: Allocation, shape: Shape) -> str:
    """The site's launcher; `auto` is srun inside Slurm, else mpirun where there is one, else local."""
    kind = str(job["launcher"].get("kind") or "auto")
    if kind == "srun" and not allocation.in_slurm:
        kind = "auto"
    if kind != "auto":
        return kind
    if allocation.in_slurm:
        return "srun"
    if find_mpirun(str(job["launcher"].get("mpirun") or ""), os.environ):
        return "mpirun"
    say("no mpirun here: the ranks are started one by one, and find each other without MPI")
    return "local"


def launch(
    kind: str, job: Mapping[str, Any], shape: Shape, environment: Mapping[str, str], attempt: AttemptDirectory, *,
    python: str = sys.executable, nodes: Sequence[str] = (),
) -> Ranks:  # fmt: skip
    """Start the ranks of one attempt, with `python` where the job has no image.

    `nodes` are those of a heterogeneous job, one component after the other.
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
    """The site's --mpi; `none` where no MPI could start over it, and none of our ranks needs one.

    Slurm's PMIx and pmi2 number the nodes of a step as their names sort, and a heterogeneous job's ranks one component
    after the other (22.05). Where these differ, MPI_Init fails over PMIx, and over pmi2 it never returns.

    Raises:
        OwnFailureError: the ranks are a program's own, and would wait for ever.
    """
    mpi = str(job["launcher"].get("mpi") or "")
    are_sorted = list(nodes) == sorted(nodes, key=_as_slurm_sorts)
    if are_sorted or not mpi.startswith("pmi"):
        return mpi
    unsorted = f"the components' nodes ({', '.join(nodes)}) do not stand as their names sort"
    if not is_foreign(job["job"]["entry"]):
        say(f"{unsorted}, so the ranks start without {'PMIx' if mpi.startswith('pmix') else mpi}")
        return "none"
    if not mpi.startswith("pmix"):
        raise OwnFailureError(f"{unsorted}: over {mpi} the start of MPI would never end", fix=PMIX_ORDER.fix)
    return mpi


def _as_slurm_sorts(node: str) -> list[tuple[int, str]]:
    """node2 before node10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"([0-9]+)", node)]
