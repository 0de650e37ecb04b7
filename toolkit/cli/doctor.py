"""`doctor`: is all well here."""

from __future__ import annotations

import json
from pathlib import Path

import click

from toolkit.cli.options import SITE, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import site_runs


@click.command()
@click.option("--site", type=SITE, metavar="NAME", help="Site's name or file [TOOLKIT_SITE, detected].")
@runs_option
@json_option
@print_command_option
def doctor(site: str | None, runs: Path | None, as_json: bool) -> int:
    """Examine Python, MPI, torch, Slurm, the site, the folder of runs and limits; exit code 1 where anything is wrong.

    \b
    toolkit doctor
    toolkit doctor --json
    """
    from toolkit.errors import CHECK_FAILED
    from toolkit.terminal.talk import clean
    from toolkit.upkeep.doctor import ERROR, OK, examine

    signs = []
    for sign in examine(site_runs(runs), site_name=site):
        signs.append(sign)
        if not as_json:
            colour = {OK: "green", ERROR: "red"}.get(sign.level, "yellow")
            level = click.style(f"{sign.level:7}", fg=colour)
            fix = f". Fix: {sign.fix}" if sign.fix else ""
            click.echo(f"{level} {sign.check:10} {clean(sign.detail + fix)}")
    if as_json:
        click.echo(json.dumps([sign.as_json() for sign in signs], indent=1))
    return CHECK_FAILED if any(sign.level == ERROR for sign in signs) else 0
