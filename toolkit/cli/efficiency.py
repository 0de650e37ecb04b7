"""`efficiency`: what a run used of what it asked for, and the flags to change."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.named import RUN
from toolkit.cli.options import find, json_option, print_command_option, runs_option


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def efficiency(run: str, runs: Path | None, as_json: bool, echo: bool) -> None:
    """Say what RUN used of what it asked for: walltime, CPUs, memory, GPUs, steps; and which flags to change.

    \b
    toolkit efficiency last
    """
    from toolkit.batch.efficiency.count import efficiency_of
    from toolkit.batch.efficiency.words import lines_of

    told = efficiency_of(find(run, runs), echo=echo)
    if as_json:
        click.echo(json.dumps(told.as_json(), indent=1))
    else:
        for line in lines_of(told):
            click.echo(line)
