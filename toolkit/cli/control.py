"""`save`, `stop` and `requeue`: requests to a running run."""

from datetime import timedelta
from pathlib import Path

import click

from toolkit.cli.options import RUN, print_command_option, runs_option
from toolkit.runs.named_runs import find
from toolkit.terminal.ages import Age


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
def save(run: str, runs: Path | None) -> None:
    """Make RUN save a checkpoint at its next step and continue.

    \b
    toolkit save last
    """
    from toolkit.runs.requests.control import ask_for

    status = ask_for(find(run, runs, to="save"), "save")
    click.echo(f"run {status.run_id} saves at its next step boundary (`toolkit ckpt ls {status.run_id}`)")


@click.command()
@click.argument("run", type=RUN)
@click.option("--within", type=Age(), metavar="TIME", help="Time for the save, such as 10m [warn_s, at least 60 s].")
@runs_option
@print_command_option
def stop(run: str, within: timedelta | None, runs: Path | None) -> None:
    """Make RUN save a checkpoint and stop; `resume` continues it. A second `stop` kills its ranks.

    \b
    toolkit stop last
    toolkit stop last --within 10m
    """
    from toolkit.runs.requests.control import stop_run

    within_s = within.total_seconds() if within is not None else None
    click.echo(stop_run(find(run, runs, to="stop"), within_s))


@click.command()
@click.argument("run", type=RUN)
@runs_option
@print_command_option
def requeue(run: str, runs: Path | None) -> None:
    """Make RUN save a checkpoint, and requeue its job.

    \b
    toolkit requeue last
    toolkit requeue 123_4
    """
    from toolkit.runs.requests.control import requeue_run

    status = requeue_run(find(run, runs, to="requeue"))
    click.echo(f"run {status.run_id}: job {status.full_job_id} returns to the queue ({status.reason})")
