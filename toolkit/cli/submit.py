"""`submit`, `render` and `preflight`: from a job to a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.job_request import AskedJob, asks_for_job
from toolkit.cli.options import Command, json_option, print_command_option
from toolkit.cli.param_types import RUN
from toolkit.cli.places import find
from toolkit.talk import say
from toolkit.terminal.character_set import is_plain

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.config.site import Site
    from toolkit.rundir.layout import RunDirectory
    from toolkit.runs.record.parents import Parent
    from toolkit.submission.submit_run import Submitted

wait_option = click.option("--wait", is_flag=True, help="Follow the run to its end; the exit code is the job's.")
parsable_option = click.option("--parsable", is_flag=True, help="Print `JOB_ID;RUN_ID` alone.")
force_option = click.option("--force", is_flag=True, help="Submit what `toolkit preflight` refuses.")


def _sweep_options(function: Command) -> Command:
    """Add --sweep and --grid."""
    grid = click.option(
        "--grid",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Values of the tasks, as TOML, CSV or JSON lines.",
    )
    sweep = click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="KEY=V1,V2",
        help="A task for each value; with several, each combination.",
    )
    return sweep(grid(function))


after_option = click.option(
    "--after",
    type=RUN,
    multiple=True,
    metavar="RUN[:ok|any]",
    help="Begin once RUN is completed, or has ended in any way.",
)


def _resolve(asked: AskedJob, site: Site) -> ResolvedJob:
    """The job on its site; the limits of a partition that it names are looked at with the cluster's own."""
    from toolkit.site.partitions import resolve_on

    return resolve_on(asked.resolver(limits=False), site, say)


def announce(submitted: Submitted, *, parsable: bool) -> None:
    """Say which job a run has become; where stdout does not take it, on stderr, since the job is there all the same."""
    from toolkit.slurm.clusters import named

    job = named(submitted.job_id, submitted.cluster)
    told = f"run {submitted.run.run_id} is job {job}, in {submitted.run.path}"
    try:
        click.echo(f"{submitted.job_id};{submitted.run.run_id}" if parsable else told)
    except OSError:
        say(told)
        raise


def follow(run: RunDirectory) -> None:
    from toolkit.runs.follow.follow import follow_to_end

    sys.exit(follow_to_end(run, plain=is_plain()))


@click.command()
@asks_for_job
@_sweep_options
@after_option
@wait_option
@parsable_option
@force_option
@print_command_option
@click.option("--dry-run", is_flag=True, help="Print the script that would be submitted, and keep nothing.")
def submit(
    asked: AskedJob, sweeps: tuple[str, ...], grid: Path | None, after: tuple[str, ...], wait: bool, parsable: bool,
    force: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Submit JOB: a job file, or the name of a shipped job. What follows `--` goes to the job.

    \b
    toolkit submit train_lm --site local --wait
    toolkit submit my_job.toml -N 4 --ntasks-per-node 8 -t 2:00:00 -- --my-flag
    toolkit submit my_job.toml --sweep train.lr=1e-3,3e-4 --sweep args.layers=2,4
    toolkit submit my_job.toml --after last:ok
    """
    from toolkit.cli.preflight import FORCED, RENDERED
    from toolkit.rundir.layout import discard_run
    from toolkit.submission.submit_run import submit_new

    instead = RENDERED if dry_run else FORCED if force else ""
    resolved, run = _new(asked, sweeps, grid, after, instead=instead)
    if dry_run:
        script = run.script(0).read_text(encoding="utf-8")
        discard_run(run)
        click.echo(script, nl=False)
        return
    announce(submit_new(run, resolved), parsable=parsable)
    if wait:
        follow(run)


def _new(
    asked: AskedJob, sweeps: tuple[str, ...], grid: Path | None, after: tuple[str, ...], *, instead: str,
) -> tuple[ResolvedJob, RunDirectory]:  # fmt: skip
    """A job with the values of its sweep and the runs that it follows, and its run directory."""
    from toolkit.cli.preflight import look_first, tell_cost
    from toolkit.runs.record.job import uses_slurm
    from toolkit.site.detect import choose_site
    from toolkit.submission.submit_run import create
    from toolkit.submission.sweep.sweep import array_of, read_sweep_options, resolve_sweep, warn_of_unread

    rows = read_sweep_options(sweeps, grid)
    if rows:
        asked = asked.shaped({"array": array_of(rows, asked.shape["array"])})
    chosen = choose_site(asked.site).site
    resolved = _resolve(asked, chosen)
    options = asked.sbatch_options(for_sbatch=uses_slurm(resolved))
    swept = resolve_sweep(resolved, chosen, rows) if rows else None
    warn_of_unread(resolved, rows)
    folder = asked.runs_folder(resolved)
    parents = parents_of(after, folder, resolved)
    cost = look_first(resolved, folder, site=chosen, extra_sbatch_options=options, instead=instead)
    run = create(resolved, folder, extra_sbatch_options=options, sweep=swept, after=parents)
    tell_cost(cost)
    return resolved, run


def parents_of(after: tuple[str, ...], runs: Path | None, job: ResolvedJob) -> list[Parent]:
    """The runs that a job is to follow."""
    if not after:
        return []  # without the imports, which take as long as a question to Slurm
    from toolkit.submission.chain import find_parents

    return find_parents(after, job, lambda name: find(name, runs))


@click.command()
@asks_for_job
@_sweep_options
@after_option
@print_command_option
def render(asked: AskedJob, sweeps: tuple[str, ...], grid: Path | None, after: tuple[str, ...]) -> None:
    """Print the script of JOB, ready for sbatch; its empty run directory is made.

    \b
    toolkit render train_lm -N 2 -t 1:00:00 > job.sbatch
    """
    from toolkit.cli.preflight import RENDERED

    _, run = _new(asked, sweeps, grid, after, instead=RENDERED)
    click.echo(run.script(0).read_text(encoding="utf-8"), nl=False)


@click.command()
@asks_for_job
@json_option
@print_command_option
def preflight(asked: AskedJob, as_json: bool) -> None:
    """Say whether JOB would run, and what it may cost; nothing is written. `submit` looks at the same first.

    \b
    toolkit preflight train_lm
    toolkit preflight my_job.toml -N 4 -t 2:00:00 --json
    """
    from toolkit.cli.preflight import print_preflight
    from toolkit.runs.record.job import uses_slurm
    from toolkit.site.detect import choose_site

    chosen = choose_site(asked.site).site
    resolved = _resolve(asked, chosen)
    options = asked.sbatch_options(for_sbatch=uses_slurm(resolved))
    print_preflight(resolved, asked.runs_folder(resolved), site=chosen, extra_sbatch_options=options, as_json=as_json)
