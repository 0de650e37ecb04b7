"""`run`: a job in the foreground, on the nodes of the allocation that this process is in, else on this machine."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from toolkit.cli.options import SESSION, asks_for_job, echo_log, print_command_option

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest
    from toolkit.config.resolved import ResolvedJob
    from toolkit.rundir.layout import RunDirectory


@click.command()
@asks_for_job
@click.option("--session", type=SESSION, metavar="NAME", help="On the nodes of this session (`toolkit session ls`).")
@print_command_option
def run(request: JobRequest, session: str | None) -> None:
    """Run JOB in the foreground: with srun inside an allocation, else on this machine. Ctrl-C saves and ends it.

    An allocation sets the nodes, and the tasks on each node that the user requested from salloc.

    \b
    toolkit run mpi_hello -n 4
    toolkit run train_lm --session dev
    salloc -N 2 --ntasks-per-node 4 toolkit run train_lm
    """
    from toolkit.submission.run_here import make_here, resolve_here

    inside = None
    if session:
        from toolkit.session.session import enter

        inside = enter(session, os.environ)
    resolved = resolve_here(request, inside=inside)
    live_here(make_here(request, resolved), resolved, 0)


def live_here(directory: RunDirectory, job: ResolvedJob, start: int) -> NoReturn:
    """Run one start in the foreground; the exit code is the job's."""
    from toolkit.submission.run_here import follow_here

    sys.exit(follow_here(directory, job, start, echo_log, partial(click.echo, err=True)))
