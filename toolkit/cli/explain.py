"""`explain`, `efficiency` and `timeline`: why a run is in its state, its resource use, and its time."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.errors import NotFoundError
from toolkit.rundir.find import NoRunError
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import has_unicode, is_plain, plain


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def explain(run: str, runs: Path | None, as_json: bool) -> None:
    """Explain why RUN, or any Slurm job, waits, fails or continues, what happens next, and what to do.

    \b
    toolkit explain last
    toolkit explain 123_4
    """
    from toolkit.runs.explain.explain import explain_run, lines_of
    from toolkit.runs.explain.foreign import explain_job

    try:
        found = find(run, runs)
    except NotFoundError as error:
        job = explain_job(run, is_queued=not isinstance(error, NoRunError))
        if job is None:
            raise
        _print(job.as_json() if as_json else job.lines())
        return
    explanation = explain_run(found)
    _print(explanation.as_json() if as_json else lines_of(explanation))


def _print(explained: dict[str, Any] | Iterator[str]) -> None:
    if isinstance(explained, dict):
        click.echo(json.dumps(explained, indent=1))
        return
    for line in explained:
        click.echo(plain(line.replace("\n", " ")))  # a quoted path may contain escapes


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def efficiency(run: str, runs: Path | None, as_json: bool) -> None:
    """Compare the requested and used walltime, CPUs, memory, GPUs and steps of RUN; advise which flags to change.

    \b
    toolkit efficiency last
    """
    from toolkit.runs.efficiency.count import efficiency_of
    from toolkit.runs.efficiency.rendering import lines_of

    efficiency_report = efficiency_of(find(run, runs))
    if as_json:
        click.echo(json.dumps(efficiency_report.as_json(), indent=1))
    else:
        for line in lines_of(efficiency_report):
            click.echo(line)


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def timeline(run: str, runs: Path | None, as_json: bool) -> None:
    """Draw how RUN spent its time: queue, start, steps, saves, and lost steps.

    \b
    toolkit timeline last
    toolkit timeline 123_4 --json
    """
    from toolkit.runs.timeline.picture import Pen, lines_of
    from toolkit.runs.timeline.timeline import timeline_of

    found = timeline_of(find(run, runs))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
        return
    columns = shutil.get_terminal_size((100, 24)).columns
    pen = Pen(columns, has_unicode() and not is_plain(), colour=sys.stdout.isatty() and not is_plain())
    for line in lines_of(found, pen):
        click.echo(line)
