"""The arguments of a command that makes a run, as one `JobRequest`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from toolkit.cli.options import SHAPE, Command, job_options, runs_option, shape_of
from toolkit.cli.param_types import JOB, RUN, SITE

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest

__all__ = ["after_option", "asks_for_job", "request_of", "sweep_options"]

after_option = click.option(
    "--after",
    type=RUN,
    multiple=True,
    metavar="RUN[:ok|any]",
    help="Start once RUN has completed, or has ended in any way.",
)


def request_of(job: str, values: Mapping[str, Any], **fields: Any) -> JobRequest:
    """Return the request for JOB with the values of `job_options` and other fields of `JobRequest`."""
    from toolkit.config.request import JobRequest

    return JobRequest(job, **shape_of(values), **fields)


def sweep_options(function: Command) -> Command:
    """Add --sweep and --grid; they are part of the request."""
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
        help="A task for each value; several options give every combination.",
    )
    return sweep(grid(function))


def asks_for_job(function: Command) -> Command:
    """Add what every command that makes a run takes; the command gets a `JobRequest` as its first argument."""

    @functools.wraps(function)
    def command(*, job: str, **given: Any) -> Any:
        shape = {name: given.pop(name) for name in SHAPE}
        fields = ("argv", "site", "runs", "settings", "sweeps", "grid", "after")
        asked = {name: given.pop(name) for name in fields if name in given}
        return function(request_of(job, shape, **asked), **given)

    with_options = runs_option(job_options(cast(Command, command)))
    of_site = click.option("--site", type=SITE, metavar="NAME", help="Site's name or file [TOOLKIT_SITE, detected].")
    of_argv = click.argument("argv", nargs=-1, type=click.UNPROCESSED)
    return click.argument("job", type=JOB)(of_argv(of_site(with_options)))
