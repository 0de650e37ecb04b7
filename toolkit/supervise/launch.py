"""Which launcher starts the ranks of an attempt, and its call."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.containers import rank_command
from toolkit.supervise.launchers import Ranks, Shape, find_mpirun, launch_local, launch_mpirun, launch_srun
from toolkit.supervise.log import say


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
    python: str = sys.executable,
) -> Ranks:  # fmt: skip
    """Start the ranks of one attempt, with `python` where the job has no image."""
    table = job["launcher"]
    run = RunDirectory(attempt.path.parents[1])
    command = rank_command(job, run, environment, os.environ, launcher=kind, python=python)
    options = [*(str(option) for option in table.get("options") or []), *command.options]
    if kind == "srun":
        return launch_srun(
            shape, command.environment, attempt, command.program, mpi=str(table.get("mpi") or ""), options=options
        )  # fmt: skip
    if kind == "mpirun":
        program = str(table.get("mpirun") or "")
        return launch_mpirun(shape, command.environment, attempt, command.program, program=program, options=options)
    return launch_local(shape, command.environment, attempt, command.program)
