"""`explain`: why a run is in the state it is in, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import plain


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
def explain(run: str, runs: Path | None, as_json: bool) -> None:
    """Explain why RUN waits, fails or continues, what happens next, and what to do.

    \b
    toolkit explain last
    toolkit explain 123_4
    """
    from toolkit.runs.explain.explain import explain_run, lines_of

    explanation = explain_run(find(run, runs))
    if as_json:
        click.echo(json.dumps(explanation.as_json(), indent=1))
    else:
        for line in lines_of(explanation):
            click.echo(plain(line.replace("\n", " ")))  # a path that it quotes may hold anything
