"""`verdict`: what is wrong in a running job."""

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
@click.option("--all", "is_all", is_flag=True, help="Show all verdicts with their times, also those that were cleared.")
def verdict(run: str, runs: Path | None, as_json: bool, is_all: bool) -> None:
    """Show what slows RUN down or endangers it: ranks, node, cause, cost, and the command or key to change.

    \b
    toolkit verdict last
    toolkit verdict last --all
    """
    from toolkit.metrics.verdicts import line_of_verdict
    from toolkit.runs.status.state import run_status
    from toolkit.runs.verdicts import all_verdicts, are_past, raised_verdicts, unmeasured

    directory = find(run, runs)
    changes = all_verdicts(directory)  # reports a damaged file
    shown = changes if is_all else raised_verdicts(directory)
    if as_json:
        click.echo(json.dumps([json.loads(one.to_line()) for one in shown], indent=1))
        return
    is_past = not is_all and bool(shown) and are_past(directory, run_status(directory).state)
    for one in shown:
        when = f"{one.time}  attempt {one.attempt}  " if is_all else ""
        click.echo(plain(when + line_of_verdict(one, is_past=is_past)))
    if note := unmeasured(directory):
        click.echo(note)
    elif not shown:
        click.echo("no verdict" if is_all or not changes else "no raised verdict; --all shows those that were cleared")
