"""`submit`, `run`, `render` and `resume`: from a job to a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from toolkit.cli.options import (
    Command,
    echo_log,
    find,
    flags_of,
    job_options,
    print_command_option,
    runs_option,
    sbatch_options_of,
)

if TYPE_CHECKING:
    from toolkit.batch.resume import NextStart
    from toolkit.batch.submission import Submitted
    from toolkit.config.resolved import ResolvedJob
    from toolkit.config.site import Site
    from toolkit.rundir.layout import RunDirectory

_wait_option = click.option("--wait", is_flag=True, help="Follow the run to its end; the exit code is the job's.")
_parsable_option = click.option("--parsable", is_flag=True, help="Print `JOB_ID;RUN_ID` alone.")


def _new_run(function: Command) -> Command:
    """Add what every command that makes a run takes: JOB, what follows `--`, the site, RUNS and the job's shape."""
    function = runs_option(job_options(function))
    site = click.option("--site", metavar="NAME", help="Site's name or file [TOOLKIT_SITE, detected].")
    argv = click.argument("argv", nargs=-1, type=click.UNPROCESSED)
    return click.argument("job")(argv(site(function)))


def _resolve(
    job: str, site: Site, settings: tuple[str, ...], values: dict[str, Any], argv: tuple[str, ...]
) -> ResolvedJob:
    from toolkit.config.layers import resolve_job
    from toolkit.config.shipped import find_job

    path = find_job(job)

    def nodes_before() -> int | str:
        return resolve_job(path, site=None, environ=os.environ, settings=settings).job.nodes

    return resolve_job(
        path, site=site, environ=os.environ, settings=settings, flags=flags_of(values, nodes_before), argv=argv
    )


def runs_folder_of(runs: Path | None, job: ResolvedJob) -> Path:
    """RUNS for a job: --runs > TOOLKIT_RUNS > its site's > ./runs."""
    from toolkit.rundir.find import runs_folder

    return runs_folder(runs, os.environ, job.paths.runs)


def _announce(submitted: Submitted, *, parsable: bool) -> None:
    if parsable:
        click.echo(f"{submitted.job_id};{submitted.run.run_id}")
    else:
        click.echo(f"run {submitted.run.run_id} is job {submitted.job_id}, in {submitted.run.path}")


def _follow(run: RunDirectory) -> None:
    from toolkit.batch.follow import follow_to_end

    sys.exit(follow_to_end(run))


@click.command()
@_new_run
@_wait_option
@_parsable_option
@print_command_option
@click.option("--dry-run", is_flag=True, help="Print the script that would be submitted; as `render`.")
def submit(
    job: str, argv: tuple[str, ...], site: str | None, runs: Path | None, settings: tuple[str, ...], wait: bool,
    parsable: bool, echo: bool, dry_run: bool, **values: Any,
) -> None:  # fmt: skip
    """Submit JOB: a job file, or the name of a shipped job. What follows `--` goes to the job.

    \b
    toolkit submit train_lm --site local --wait
    toolkit submit my_job.toml -N 4 --ntasks-per-node 8 -t 2:00:00 -- --my-flag
    """
    from toolkit.batch.submission import create, submit_new, uses_slurm
    from toolkit.site.detect import choose_site

    resolved = _resolve(job, choose_site(site).site, settings, values, argv)
    options = sbatch_options_of(values, for_sbatch=uses_slurm(resolved))
    run = create(resolved, runs_folder_of(runs, resolved), once=options)
    if dry_run:
        click.echo(run.script(0).read_text(encoding="utf-8"), nl=False)
        return
    _announce(submit_new(run, resolved, echo=echo), parsable=parsable)
    if wait:
        _follow(run)


@click.command()
@_new_run
def render(
    job: str, argv: tuple[str, ...], site: str | None, runs: Path | None, settings: tuple[str, ...], **values: Any
) -> None:  # fmt: skip
    """Print the script of JOB, ready for sbatch; its empty run directory is made."""
    from toolkit.batch.submission import create, uses_slurm
    from toolkit.site.detect import choose_site

    resolved = _resolve(job, choose_site(site).site, settings, values, argv)
    options = sbatch_options_of(values, for_sbatch=uses_slurm(resolved))
    run = create(resolved, runs_folder_of(runs, resolved), once=options)
    click.echo(run.script(0).read_text(encoding="utf-8"), nl=False)


@click.command()
@click.argument("run")
@click.option("--site", metavar="NAME", help="Another site, by its name or file [the one of the run's last start].")
@runs_option
@job_options
@click.option("--from", "checkpoint", metavar="CKPT", help="Step, folder name or path [the newest that verifies].")
@click.option("--here", is_flag=True, help="Go on here and now, as `run` does, instead of submitting.")
@_wait_option
@_parsable_option
@print_command_option
def resume(
    run: str, site: str | None, runs: Path | None, settings: tuple[str, ...], checkpoint: str | None, here: bool,
    wait: bool, parsable: bool, echo: bool, **values: Any,
) -> None:  # fmt: skip
    """Continue RUN from its newest checkpoint as a new job, maybe on another number of ranks.

    \b
    toolkit resume last
    toolkit resume last -n 2 --set train.steps=300 --wait
    toolkit resume last --here
    toolkit resume last --site local
    """
    part = find(run, runs)
    prepared = _prepare(part, site, settings, checkpoint, values, here=here)
    if here:
        _live_here(part.whole, prepared.job, prepared.number)
    _announce(_hand_over(prepared, echo=echo), parsable=parsable)
    if wait:
        _follow(part)


def _prepare(
    part: RunDirectory, site: str | None, settings: tuple[str, ...], checkpoint: str | None, values: dict[str, Any],
    *, here: bool,
) -> NextStart:  # fmt: skip
    """The next start of a run, which can begin: `here` needs an allocation where there is Slurm."""
    from toolkit.batch.allocation import check_here
    from toolkit.batch.resume import Changes, prepare_resume, take_back
    from toolkit.batch.submission import recorded_job
    from toolkit.config.amend import nodes_after
    from toolkit.errors import ToolkitError
    from toolkit.site.detect import choose_site

    recorded = recorded_job(part)
    chosen = choose_site(site).site if site else None
    scheduler = chosen.scheduler if chosen else recorded.scheduler
    if here and scheduler.kind == "slurm":
        _take_allocation(values, settings)
    flags = flags_of(values, lambda: nodes_after(recorded, settings))
    options = sbatch_options_of(values, for_sbatch=scheduler.kind == "slurm" and not here)
    prepared = prepare_resume(part, Changes(settings, flags, options, checkpoint, chosen))
    try:
        if here:
            check_here(prepared.job, os.environ)
    except ToolkitError:
        take_back(prepared)
        raise
    return prepared


def _hand_over(prepared: NextStart, *, echo: bool) -> Submitted:
    """Submit the next start of a run; where it is refused, the run is as it was."""
    from toolkit.batch.resume import take_back
    from toolkit.batch.submission import submit as hand_over
    from toolkit.errors import OwnFailureError, ToolkitError
    from toolkit.slurm.commands import NoAnswerError

    try:
        return hand_over(prepared.part.whole, prepared.job, prepared.number, echo=echo)
    except (NoAnswerError, OwnFailureError):
        raise  # the job may be in the queue
    except ToolkitError:
        take_back(prepared)
        raise


@click.command()
@_new_run
def run(
    job: str, argv: tuple[str, ...], site: str | None, runs: Path | None, settings: tuple[str, ...], **values: Any
) -> None:  # fmt: skip
    """Run JOB here and now: with srun inside an allocation, else on this machine. Ctrl-C saves and ends it.

    An allocation gives its nodes, and the tasks on each node that salloc was asked for.

    \b
    toolkit run mpi_hello -n 4
    salloc -N 2 --ntasks-per-node 4 toolkit run train_lm
    """
    from toolkit.batch.submission import create

    resolved = resolve_here(job, site, settings, values, argv)
    _live_here(create(resolved, runs_folder_of(runs, resolved), here=True), resolved, 0)


def resolve_here(
    job: str, site: str | None, settings: tuple[str, ...], values: dict[str, Any], argv: tuple[str, ...] = ()
) -> ResolvedJob:
    """The job as it is run here and now: on the nodes of the allocation that this is in, else on this machine."""
    from toolkit.batch.allocation import check_here
    from toolkit.site.detect import choose_site

    in_allocation = bool(os.environ.get("SLURM_JOB_ID"))
    chosen = choose_site(site or (None if in_allocation or os.environ.get("TOOLKIT_SITE") else "local")).site
    if chosen.scheduler.kind == "slurm":
        _take_allocation(values, settings)
    resolved = _resolve(job, chosen, settings, values, argv)
    check_here(resolved, os.environ)
    sbatch_options_of(values, for_sbatch=False)
    return resolved


def _take_allocation(values: dict[str, Any], settings: tuple[str, ...]) -> None:
    """Inside an allocation its nodes hold, and its tasks on each node where nothing else is said."""
    from toolkit.batch.allocation import environment_of_allocation, nodes_of_allocation, tasks_per_node

    if not os.environ.get("SLURM_JOB_ID"):
        return
    allocation = environment_of_allocation(os.environ)
    values["nodes"] = nodes_of_allocation(allocation, values.get("nodes"))
    stated = any(setting.startswith("job.ranks_per_node") for setting in settings)
    if not stated and values.get("ntasks") is None and values.get("ntasks_per_node") is None:
        values["ntasks_per_node"] = tasks_per_node(allocation)


def _live_here(directory: RunDirectory, job: ResolvedJob, start: int) -> NoReturn:
    """One start of a run in the foreground; the exit code is the job's."""
    sys.exit(follow_here(directory, job, start, echo_log))


def follow_here(directory: RunDirectory, job: ResolvedJob, start: int, write: Callable[[str], object]) -> int:
    """One start of a run in the foreground, to its end: the job's exit code. `write` takes the lines of the ranks."""
    from rich.console import Console

    from toolkit.batch.follow import exit_code_of, report_end
    from toolkit.batch.foreground import Interrupts, show_output, start_here
    from toolkit.batch.state import run_status

    earlier = len(directory.attempt_numbers())
    with Interrupts(directory) as interrupts:
        click.echo(f"run {directory.run_id}, in {directory.path}", err=True)
        supervisor = interrupts.supervisor = start_here(directory, job, start)
        show_output(directory, supervisor, write, partial(click.echo, err=True), first_attempt=earlier)
    status = run_status(directory)
    report_end(status, directory, Console(stderr=True))
    return exit_code_of(status)
