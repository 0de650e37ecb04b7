"""`save`, `stop` and `requeue`: what a living run can be asked for."""

from __future__ import annotations

from pathlib import Path

import click

from toolkit.cli.options import find, print_command_option, runs_option


@click.command()
@click.argument("run", default="last")
@runs_option
def save(run: str, runs: Path | None) -> None:
    """Ask RUN to save at its next step, and to go on."""
    from toolkit.batch.control import ask_for

    status = ask_for(find(run, runs), "save")
    click.echo(f"run {status.run_id} saves at its next step boundary (`toolkit ckpt ls {status.run_id}`)")


@click.command()
@click.argument("run")
@runs_option
def stop(run: str, runs: Path | None) -> None:
    """Ask RUN to save and end. `resume` continues it."""
    from toolkit.batch.control import ask_for, what_follows_a_stop

    directory = find(run, runs)
    ask_for(directory, "stop")
    click.echo(what_follows_a_stop(directory))


@click.command()
@click.argument("run")
@runs_option
@print_command_option
def requeue(run: str, runs: Path | None, echo: bool) -> None:
    """Have RUN save, and put its job back into the queue."""
    from toolkit.batch.control import requeue_run

    status = requeue_run(find(run, runs), echo=echo)
    click.echo(f"run {status.run_id}: job {status.job_id} goes back into the queue ({status.reason})")
