"""`run`: a job here and now, on the nodes of the allocation that this is in, else on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from toolkit.cli.job_request import AskedJob, asks_for_job
from toolkit.cli.options import echo_log, print_command_option
from toolkit.cli.param_types import SESSION

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.config.site import Site
    from toolkit.rundir.layout import RunDirectory


@click.command()
@asks_for_job
@click.option("--session", type=SESSION, metavar="NAME", help="On the nodes of this session (`toolkit session ls`).")
@print_command_option
def run(asked: AskedJob, session: str | None) -> None:
    """Run JOB here and now: with srun inside an allocation, else on this machine. Ctrl-C saves and ends it.

    An allocation gives its nodes, and the tasks on each node that salloc was asked for.

    \b
    toolkit run mpi_hello -n 4
    toolkit run train_lm --session dev
    salloc -N 2 --ntasks-per-node 4 toolkit run train_lm
    """
    from toolkit.submission.submit_run import create

    inside = _session_site(session) if session else None
    resolved = resolve_here(asked, inside=inside)
    live_here(create(resolved, asked.runs_folder(resolved), here=True), resolved, 0)


def _session_site(name: str) -> Site:
    from toolkit.session.session import enter

    return enter(name, os.environ)


def resolve_here(
    asked: AskedJob, *, inside: Site | None = None, of_several: str = "`toolkit submit ...`"
) -> ResolvedJob:
    """The job as it is run here and now: on the nodes of the allocation that this is in, else on this machine.

    `inside` is the site of the session that this has entered; `of_several` is what to do with a job of several components.
    """
    from toolkit.site.detect import choose_site
    from toolkit.site.partitions import resolve_in_allocation
    from toolkit.submission.allocation import check_here, refuse_shapes

    refuse_shapes(asked.resolver()(None, {}), of_several)  # whatever the site
    in_allocation = bool(os.environ.get("SLURM_JOB_ID"))
    usual = None if in_allocation or os.environ.get("TOOLKIT_SITE") else "local"
    chosen = inside if inside is not None and asked.site is None else choose_site(asked.site or usual).site
    if chosen.scheduler.kind == "slurm":
        asked = asked.shaped(shape_of_allocation(asked.shape, asked.settings))
    resolved = resolve_in_allocation(asked.resolver(), chosen)
    check_here(resolved, os.environ)
    asked.sbatch_options(for_sbatch=False)
    return resolved


def shape_of_allocation(shape: Mapping[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """What the allocation that this is in decides of a job's shape: its nodes, and its tasks on each where nothing else is said.

    Empty where this is in none.
    """
    from toolkit.submission.allocation import (
        cluster_here,
        environment_of_allocation,
        nodes_of_allocation,
        tasks_per_node,
    )

    if not os.environ.get("SLURM_JOB_ID"):
        return {}
    allocation = environment_of_allocation(os.environ)
    decided: dict[str, Any] = {
        "clusters": cluster_here(os.environ, shape.get("clusters")),
        "nodes": nodes_of_allocation(allocation, shape.get("nodes")),
    }
    stated = any(setting.startswith("job.ranks_per_node") for setting in settings)
    if not stated and shape.get("ntasks") is None and shape.get("ntasks_per_node") is None:
        decided["ntasks_per_node"] = tasks_per_node(allocation)
    return decided


def live_here(directory: RunDirectory, job: ResolvedJob, start: int) -> NoReturn:
    """One start of a run in the foreground; the exit code is the job's."""
    sys.exit(follow_here(directory, job, start, echo_log))


def follow_here(directory: RunDirectory, job: ResolvedJob, start: int, write: Callable[[str], object]) -> int:
    """One start of a run in the foreground, to its end: the job's exit code. `write` takes the lines of the ranks."""
    from rich.console import Console

    from toolkit.runs.follow.follow import exit_code_of, report_end
    from toolkit.runs.status.state import run_status
    from toolkit.submission.foreground import Interrupts, show_output, start_here

    earlier = len(directory.attempt_numbers())
    with Interrupts(directory) as interrupts:
        click.echo(f"run {directory.run_id}, in {directory.path}", err=True)
        supervisor = interrupts.supervisor = start_here(directory, job, start)
        show_output(directory, supervisor, write, partial(click.echo, err=True), first_attempt=earlier)
    status = run_status(directory)
    report_end(status, directory, Console(stderr=True))
    return exit_code_of(status)
