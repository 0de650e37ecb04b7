"""`doctor` and `gc`: check this installation, and remove unused files and runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options import SITE, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import folder_of_runs, site_runs
from toolkit.terminal.ages import Age

if TYPE_CHECKING:
    from toolkit.upkeep.leftovers import Leftover


@click.command()
@click.option(
    "--site", type=SITE, metavar="NAME", help="Site name or file [default: $TOOLKIT_SITE, otherwise detected]."
)
@runs_option
@json_option
@print_command_option
def doctor(site: str | None, runs: Path | None, as_json: bool) -> int:
    """Check Python, MPI, torch, Slurm, the site, the folder of runs and limits; exit code 1 on an error.

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


@click.command()
@runs_option
@click.option("--older-than", type=Age(), help="Also remove whole runs that ended longer ago than this: 30d, 12w.")
@click.option("--keep-checkpoints", is_flag=True, help="With --older-than: keep runs that have a checkpoint.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation.")
@json_option
@print_command_option
def gc(
    runs: Path | None, older_than: timedelta | None, keep_checkpoints: bool, dry_run: bool, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Remove runs that never started, and leftovers of interrupted saves.

    Whole runs are removed only with --older-than. A run is left untouched if it is active, if another run starts from
    it, or if it changed within the last hour.

    \b
    toolkit gc --dry-run
    toolkit gc --older-than 30d --keep-checkpoints
    """
    from toolkit.upkeep.leftovers import find_leftovers

    if keep_checkpoints and older_than is None:
        raise click.UsageError("--keep-checkpoints requires --older-than")
    folder = folder_of_runs(runs)
    found = find_leftovers(folder, older_than=older_than, keep_checkpoints=keep_checkpoints)
    if as_json:
        click.echo(json.dumps([one.as_json() for one in found], indent=1))
    else:
        _print(found, folder)
    if dry_run or not found:
        return 0
    _ask(found, yes=yes)
    return _remove(found)


def _print(found: Sequence[Leftover], folder: Path) -> None:
    from toolkit.cli.ckpt_print import size
    from toolkit.errors import counted
    from toolkit.terminal.talk import plain

    for one in found:
        click.echo(plain(f"{size(one.size_bytes):>9}  {one.path.relative_to(folder)}  {one.why}"))
    click.echo(
        f"{size(sum(one.size_bytes for one in found))} in {counted(len(found), 'folder')} below {plain(str(folder))}"
    )


def _ask(found: Sequence[Leftover], *, yes: bool) -> None:
    from toolkit.errors import ToolkitError, counted

    if yes:
        return
    if not sys.stdin.isatty():
        raise ToolkitError("nothing was removed: there is no terminal to confirm it", fix="pass --yes, or --dry-run")
    click.confirm(f"Remove {counted(len(found), 'folder')}?", abort=True, err=True)


def _remove(found: Sequence[Leftover]) -> int:
    """Remove all; report each failure, and return 1 if there was one."""
    from toolkit.errors import CHECK_FAILED, ToolkitError
    from toolkit.terminal.talk import say
    from toolkit.upkeep.leftovers import remove

    left = 0
    for one in found:
        try:
            remove(one)
        except ToolkitError as error:
            say(str(error))
            left += 1
    return CHECK_FAILED if left else 0
