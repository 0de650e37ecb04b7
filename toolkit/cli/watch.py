"""`watch`: progress of runs, refreshed until they end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.errors import InterruptedWaitError
from toolkit.runs.named_runs import find, folders_of_runs
from toolkit.terminal.talk import has_unicode, is_plain, say

if TYPE_CHECKING:
    from toolkit.runs.follow.progress import Progress
    from toolkit.runs.follow.watch import Watch

PERIOD_S = 1.0
# Seconds between the lines for a run whose state does not change, without a terminal.
LINE_PERIOD_S = 10.0


@click.command()
@click.argument("run", required=False, type=RUN)
@runs_option
@json_option
@print_command_option
def watch(run: str | None, runs: Path | None, as_json: bool) -> None:
    """Show the progress of RUN, or of all unfinished runs, until they end; with RUN, exit with its exit code.

    \b
    toolkit watch
    toolkit watch last --json
    """
    from rich.console import Console

    from toolkit.runs.follow.follow import exit_code_of, report_end
    from toolkit.runs.follow.watch import Watch
    from toolkit.runs.status.state import require_submitted

    directory = find(run, runs) if run is not None else None
    if directory is not None:
        require_submitted(directory)
    watched = Watch([directory]) if directory is not None else Watch([], all_of=folders_of_runs(runs))
    try:
        found = _follow(watched, as_json=as_json)
    except KeyboardInterrupt:
        name = directory.run_id if directory is not None else "RUN"
        them = "the run continues" if directory is not None else "the runs continue"
        raise InterruptedWaitError(
            f"{them}; `toolkit watch{'' if directory is None else ' ' + name}` shows more, `toolkit cancel {name}` ends it"
        ) from None
    if not found:
        say("no run is active; `toolkit history` lists those that have ended")
    if directory is not None:
        report_end(found[0].status, directory, Console(stderr=True))
        sys.exit(exit_code_of(found[0].status))


def _follow(watched: Watch, *, as_json: bool) -> list[Progress]:
    """Show progress until all runs have ended; return their last states."""
    from rich.console import Console, Group
    from rich.live import Live

    from toolkit.observe.readings import RunReadings
    from toolkit.observe.window_grid import WindowGrid
    from toolkit.runs.follow.heat import heat_of
    from toolkit.runs.follow.rendering import screen_of
    from toolkit.terminal.progress import given_back

    console = Console()
    if as_json or not console.is_terminal:
        return _print_lines(watched, as_json=as_json)
    if is_plain():  # in a plain terminal, rich must not print bold or dim text
        console = Console(color_system=None)
    unicode = has_unicode() and not is_plain()
    readings = [RunReadings(run, grid=WindowGrid()) for run in watched.runs if not watched.all_of]
    with given_back(), Live(console=console, auto_refresh=False) as live:
        while True:
            found = watched.look()
            for one in readings:
                one.update()
            if found:
                heats = [heat_of(one, console.width, unicode=unicode) for one in readings]
                live.update(Group(screen_of(found, unicode=unicode), *filter(None, heats)), refresh=True)
            if watched.are_over(found):
                return found
            time.sleep(PERIOD_S)


def _print_lines(watched: Watch, *, as_json: bool) -> list[Progress]:
    """Print a line for each run when its state or attempt changes, and at intervals in between."""
    from toolkit.runs.follow.rendering import line_of

    printed: dict[str, tuple[object, str, float]] = {}
    while True:
        found = watched.look()
        for one in found:
            status = one.status
            new = (status.state, one.attempt)
            changing = f"{status.reason} {one.step} {one.saved_step} {one.ranks_started} {one.last_line} {one.verdicts}"
            before, words, at = printed.get(status.run_id, (None, "", float("-inf")))
            if new == before and (changing == words or time.monotonic() - at < LINE_PERIOD_S):
                continue
            printed[status.run_id] = (new, changing, time.monotonic())
            several = f"{status.run_id} " if watched.all_of else ""
            click.echo(one.as_json() if as_json else several + line_of(one))
        if watched.are_over(found):
            return found
        time.sleep(PERIOD_S)
