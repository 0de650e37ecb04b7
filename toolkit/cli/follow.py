"""`status`, `logs`, `wait`, `cancel` and `history`: follow what was submitted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options import echo_log, find, json_option, print_command_option, runs_option, site_runs

if TYPE_CHECKING:
    from toolkit.batch.state import RunStatus
    from toolkit.rundir.layout import RunDirectory


task_option = click.option("--task", type=click.IntRange(min=0), metavar="T", help="Task T of an array run.")


def _part(run: str, task: int | None, runs: Path | None) -> RunDirectory:
    """RUN, or with --task that task of it."""
    from toolkit.batch.state import require_task

    directory = find(run, runs)
    if task is not None:
        directory = directory.whole.task(task)
        require_task(directory)
    return directory


def _folder_of_runs(named: Path | None) -> Path:
    """RUNS. One that --runs names must be there; the others come with the first run."""
    from toolkit.errors import NotFoundError

    folder = site_runs(named)
    if named is not None and not folder.is_dir():
        raise NotFoundError("there is no such folder", where=str(folder), fix="name the folder of all runs with --runs")
    return folder


def _table(statuses: Sequence[RunStatus]) -> None:
    """squeue-like columns, each as wide as its widest value."""
    from toolkit.supervise.failures import clean

    rows = [("RUN", "JOB", "STATE", "JOBID", "SITE", "NODES", "RANKS", "STEP", "REASON")]
    for status in statuses:
        step = "" if status.step is None else str(status.step)
        rows.append(
            (
                status.run_id,
                status.job_name,
                status.state.value,
                status.job_id,
                status.site,
                str(status.nodes),
                str(status.ranks),
                step,
                status.reason,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        line = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + " " + row[-1]
        click.echo(clean(line.replace("\n", " ")))


@click.command()
@click.argument("run", nargs=-1)
@runs_option
@json_option
@print_command_option
@click.option("--live", is_flag=True, help="All runs that have not ended.")
def status(run: tuple[str, ...], runs: Path | None, as_json: bool, echo: bool, live: bool) -> None:
    """State of each RUN: a run id, a Slurm job id, or `last`, which is the default."""
    from toolkit.batch.history import living_runs, statuses_of
    from toolkit.batch.state import run_status

    if live and run:
        raise click.UsageError("--live is all runs that live; leave out RUN")
    if live:
        found = living_runs(_folder_of_runs(runs), echo=echo)
    elif len(run) <= 1:
        found = [run_status(find(run[0] if run else "last", runs), echo=echo)]
    else:
        found = statuses_of([find(name, runs) for name in run], echo=echo)
    if as_json:
        one_alone = len(run) <= 1 and not live
        entries = [entry.as_json() for entry in found]
        click.echo(json.dumps(entries[0] if one_alone else entries, indent=1))
    else:
        _table(found)


@click.command()
@click.argument("run", default="last")
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", metavar="N|all", help="A rank's own log, or all of them, instead of the supervisor's.")
@click.option("--attempt", type=int, help="Of this attempt [the last].")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=0, help="Only the last lines [all].")
@task_option
def logs(
    run: str, runs: Path | None, follow: bool, rank: str | None, attempt: int | None, lines: int, task: int | None
) -> None:
    """What RUN wrote: the supervisor's log, or the ranks'."""
    from toolkit.batch.follow import Follower
    from toolkit.batch.logs import read_logs
    from toolkit.batch.state import require_submitted

    directory = _part(run, task, runs)
    if follow:
        require_submitted(directory)
    follower = Follower(directory)
    for line in read_logs(directory, rank=rank, attempt=attempt, lines=lines, follow=follow, over=follower.is_over):
        echo_log(line)


@click.command()
@click.argument("run", default="last")
@runs_option
def wait(run: str, runs: Path | None) -> None:
    """Wait until RUN ends; the exit code is the job's."""
    from toolkit.batch.follow import follow_to_end
    from toolkit.batch.state import require_submitted

    directory = find(run, runs)
    require_submitted(directory)
    sys.exit(follow_to_end(directory))


@click.command()
@click.argument("run", nargs=-1, required=True)
@runs_option
@print_command_option
@task_option
def cancel(run: tuple[str, ...], runs: Path | None, echo: bool, task: int | None) -> None:
    """Ask each RUN to save and end."""
    from toolkit.errors import ToolkitError

    if task is not None and len(run) > 1:
        raise click.UsageError("--task is of one RUN; write RUN_T for each")
    refused = []
    for name in dict.fromkeys(run):
        try:
            click.echo(_cancel(_part(name, task, runs), echo=echo))
        except ToolkitError as error:  # what cannot be cancelled keeps no other from it
            refused.append(error)
    if refused:
        refused[0].others = (*refused[0].others, *refused[1:])
        raise refused[0]


def _cancel(directory: RunDirectory, *, echo: bool) -> str:
    """Ask a run, or a task, to end; what follows."""
    from toolkit.batch.cancel import cancel_run, cancel_task, what_follows
    from toolkit.supervise.failures import clean

    number, whole = directory.task_number, directory.whole
    status = cancel_run(whole, echo=echo) if number is None else cancel_task(whole, number, echo=echo)
    return clean(what_follows(status))


@click.command()
@runs_option
@json_option
@click.option("-J", "--job-name", default="", help="Only runs of this job.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=50, show_default=True, help="At most so many; 0 is all."
)
def history(runs: Path | None, as_json: bool, job_name: str, limit: int) -> None:
    """All runs, the newest first."""
    from toolkit.batch.history import list_runs

    statuses = list_runs(_folder_of_runs(runs), job=job_name, limit=limit)
    if as_json:
        click.echo(json.dumps([entry.as_json() for entry in statuses], indent=1))
    else:
        _table(statuses)
