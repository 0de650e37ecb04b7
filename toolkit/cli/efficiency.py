"""`efficiency`: what a run used of what it asked for, and the flags to change."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import find


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def efficiency(run: str, runs: Path | None, as_json: bool) -> None:
    """Say what RUN used of what it asked for: walltime, CPUs, memory, GPUs, steps; and which flags to change.

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
