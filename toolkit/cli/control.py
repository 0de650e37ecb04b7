"""`save`, `stop` and `requeue`: requests to a running run."""

import re
from pathlib import Path

import click

from toolkit.cli.options import RUN, print_command_option, runs_option
from toolkit.runs.named_runs import find
from toolkit.slurm.times import parse_slurm_time
from toolkit.units import parse_duration


def _seconds(_context: click.Context, _parameter: click.Parameter, text: str | None) -> float | None:
    """Return the seconds in a duration such as 90s or 5m, or a time of Slurm with a colon."""
    if text is None:
        return None
    within_s = parse_slurm_time(text) if re.fullmatch(r"[0-9]+(?::[0-9]+){1,2}", text) else parse_duration(text)
    if not within_s:
        raise click.BadParameter(f"expected a duration such as 90s, 5m, 1h or 1:30 (90 s), got {text!r}")
    return within_s


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
@click.option(
    "--within", callback=_seconds, metavar="TIME", help="Time for the save, such as 10m [warn_s, at least 60 s]."
)
@runs_option
@print_command_option
def stop(run: str, within: float | None, runs: Path | None) -> None:
    """Make RUN save a checkpoint and stop; `resume` continues it. A second `stop` kills its ranks.

    \b
    toolkit stop last
    toolkit stop last --within 10m
    """
    from toolkit.runs.requests.control import stop_run

    click.echo(stop_run(find(run, runs, to="stop"), within))


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
