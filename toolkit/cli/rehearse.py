"""`rehearse`: cause a failure, and report its cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.rundir.layout import RunDirectory
    from toolkit.runs.rehearse.fault_injection import CutOff
    from toolkit.runs.rehearse.rehearse import Injected


@click.command()
@click.argument("run", type=RUN)
@click.argument("failure", type=click.Choice(["preempt", "walltime", "kill-rank", "kill-node"]))
@click.argument("rank", type=click.IntRange(min=0), required=False)
@runs_option
@json_option
@print_command_option
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation.")
@click.option(
    "--timeout", "timeout_s", type=click.IntRange(min=1), default=600, show_default=True, metavar="SECONDS",
    help="Give up if the run has not continued by then.",
)  # fmt: skip
def rehearse(
    run: str, failure: str, rank: int | None, runs: Path | None, as_json: bool, yes: bool, timeout_s: int
) -> None:  # fmt: skip
    """Cause FAILURE in RUN now, and report the lost steps and seconds. RANK is for kill-rank.

    \b
    toolkit rehearse last preempt
    toolkit rehearse last kill-rank 3
    """
    from toolkit.runs.rehearse.fault_injection import choose
    from toolkit.runs.rehearse.rehearse import lines_of, require_stepping
    from toolkit.runs.rehearse.rehearse import rehearse as follow

    if rank is not None and failure != "kill-rank":
        raise click.UsageError(f"{failure} does not accept a rank; omit {rank}, or use kill-rank {rank}")
    directory = find(run, runs, to="rehearse")
    inject = choose(directory, require_stepping(directory), failure, rank, _cut_off(directory))
    _ask(directory, failure, yes=yes)
    cost = follow(directory, failure, inject, timeout_s=timeout_s, tell=say)
    if as_json:
        click.echo(json.dumps(cost.as_json(), indent=1))
    else:
        for line in lines_of(cost):
            click.echo(line)


def _ask(run: RunDirectory, failure: str, *, yes: bool) -> None:
    """Ask the user before making a running job fail."""
    from toolkit.errors import ToolkitError
    from toolkit.runs.rehearse.rehearse import require_stepping, what_is_at_stake

    if yes:
        return
    if not sys.stdin.isatty():
        raise ToolkitError(
            "a rehearsal makes a running job fail, but there is no terminal to confirm it", fix="pass --yes"
        )
    click.echo(what_is_at_stake(run, require_stepping(run)), err=True)
    click.confirm(f"Cause {failure} now?", abort=True, err=True)


def _cut_off(run: RunDirectory) -> CutOff | None:
    """Return a function that disconnects a node; None unless the run is on a dev cluster, where users may do that."""
    from toolkit.devcluster import cluster
    from toolkit.devcluster.layout import make_layout
    from toolkit.runs.record.job import recorded_job
    from toolkit.runs.rehearse.rehearse import Injected

    conf = Path(recorded_job(run).scheduler.conf).expanduser()
    folder = conf.parent.parent
    if not (folder / "cluster.json").exists():  # only the folder of a dev cluster has this file
        return None
    layout = make_layout(folder.name, folder)
    if layout.slurm_conf != conf:
        return None

    @contextmanager
    def cut_off(node: str) -> Iterator[Injected]:
        cluster.fail(layout, node)
        try:
            yield Injected(f"disconnected {node} from the network; it is reconnected at the end")
        finally:
            cluster.restore(layout, node)

    return cut_off
