"""`status`, `logs`, `wait`, `cancel` and `history`: follow submitted runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options import RUN, echo_log, json_option, print_command_option, runs_option
from toolkit.errors import DamagedFileError, InterruptedWaitError, ToolkitError
from toolkit.rundir.attempt_records import FAILED_INSIDE
from toolkit.rundir.states import RunState
from toolkit.runs.named_runs import find, folders_of_runs, for_each, refuse_at_last
from toolkit.supervise.symptoms import STEP_FAILED
from toolkit.terminal.ages import Moment
from toolkit.terminal.talk import is_plain, plain, print_table, say

if TYPE_CHECKING:
    from toolkit.rundir.layout import RunDirectory
    from toolkit.runs.status.state_table import RunStatus


STATE = click.Choice([state.value for state in RunState])
task_option = click.option("--task", type=click.IntRange(min=0), metavar="T", help="Select task T of an array run.")


def _part(run: str, task: int | None, runs: Path | None, *, to: str = "") -> RunDirectory:
    """Return RUN, or with --task that task of it; `to` is passed to `find`."""
    from toolkit.runs.status.state import require_task

    directory = find(run, runs, to=to)
    if task is not None:
        directory = directory.whole.task(task)
        require_task(directory)
    return directory


def _table(statuses: Sequence[RunStatus]) -> None:
    """Print a table with a line for each run."""
    from toolkit.metrics.run_metrics import in_words as metrics_in_words
    from toolkit.rundir.sweep import in_words

    rows = []
    for status in statuses:
        step = "" if status.step is None else status.step
        reason = f"{in_words(status.values)}: {status.reason}" if status.values else status.reason
        explanation = "; ".join(filter(None, (reason, metrics_in_words(status.metrics), status.validated)))
        rows.append(
            (status.full_job_id, status.run_id, status.job_name, status.state.value, status.site, status.nodes, status.ranks, step, explanation)
        )  # fmt: skip
    print_table(
        ("JOBID", "RUN", "NAME", "STATE", "SITE", "NODES", "RANKS", "STEP", "REASON"), rows,
        shed=("SITE", "RANKS", "NODES", "STEP", "REASON", "NAME", "JOBID"),
    )  # fmt: skip


def _table_of_tasks(statuses: Sequence[RunStatus]) -> None:
    """Print a table with a line for each task of the array runs."""
    from toolkit.rundir.sweep import in_words
    from toolkit.slurm.records import named

    rows = []
    for status in statuses:
        for task in status.tasks or ():
            code = "" if task.exit_code is None else task.exit_code
            values = in_words(task.values or {})
            job = named(task.job_id, status.cluster)
            rows.append((job, f"{status.run_id}_{task.task}", task.state.value, code, values, task.reason))
    print_table(
        ("JOBID", "TASK", "STATE", "EXIT", "VALUES", "REASON"), rows, shed=("JOBID", "REASON", "EXIT", "VALUES")
    )


@click.command()
@click.argument("run", type=RUN, nargs=-1)
@runs_option
@json_option
@print_command_option
@click.option("--live", is_flag=True, help="Show all runs that have not ended.")
@click.option("--tasks", "by_task", is_flag=True, help="Show a line for each task of an array, with its swept values.")
def status(run: tuple[str, ...], runs: Path | None, as_json: bool, live: bool, by_task: bool) -> None:
    """Show the state of each RUN: a run id, a Slurm job id in any form, or `last` (the default).

    \b
    toolkit status
    toolkit status 123 124_7
    toolkit status --live
    """
    if live and run:
        raise click.UsageError("--live cannot be combined with RUN: it shows all runs that have not ended")
    refused: list[ToolkitError] = []
    if live:
        from toolkit.runs.history.listing import unfinished_runs

        found = unfinished_runs(folders_of_runs(runs))
    else:
        found, refused = _named_statuses(run or ("last",), runs)
    if by_task and not as_json:
        refused += _no_arrays(found)
        found = [status for status in found if status.tasks is not None]
    if refused and not found:
        refuse_at_last(refused)
    if as_json:
        one_alone = len(run) <= 1 and not live
        entries = [entry.as_json() for entry in found]
        click.echo(json.dumps(entries[0] if one_alone else entries, indent=1))
    elif by_task:
        _table_of_tasks(found)
    else:
        _table(found)
        _print_verdicts(found)
        _print_notes(found)
    refuse_at_last(refused)


def _print_verdicts(found: Sequence[RunStatus]) -> None:
    """Print the raised verdicts of running runs, and past ones of ended runs: in a list, the worst of each."""
    from toolkit.rundir.layout import RunDirectory
    from toolkit.runs.verdicts import verdict_lines

    for one in found:
        if not (one.state is RunState.RUNNING or one.state.final) or not one.path:
            continue
        run = RunDirectory(Path(one.path))
        if one.state is RunState.RUNNING or (run.metrics / "verdicts.jsonl").exists():
            lines = verdict_lines(run, one.state)
            for line in lines[:1] if one.state.final and len(found) > 1 else lines:
                click.echo(f"{one.run_id}  {plain(line)}")


def _print_notes(found: Sequence[RunStatus]) -> None:
    """Print what rank 0 noted at its start, and what helps if steps failed inside a script."""
    from toolkit.rundir.files import read_json
    from toolkit.rundir.layout import RunDirectory

    for one in found:
        attempt = RunDirectory(Path(one.path)).last_attempt() if one.path and one.tasks is None else None
        with suppress(DamagedFileError, OSError):  # a run may lack the file, and its state does not need it
            if attempt is not None and "note" in (started := read_json(attempt.rank_file(0))):
                click.echo(f"{one.run_id}  {plain(str(started['note']))}")
        if one.state is RunState.COMPLETED and FAILED_INSIDE in one.reason:
            click.echo(f"{one.run_id}  fix: {STEP_FAILED.fix}")


def _named_statuses(names: Sequence[str], runs: Path | None) -> tuple[list[RunStatus], list[ToolkitError]]:
    """Return the status of each named run, and the errors of the others."""
    from toolkit.runs.status.state import run_statuses

    directories, refused = for_each(names, lambda name: find(name, runs))
    found = run_statuses(directories).values()
    refused += [one for one in found if isinstance(one, ToolkitError)]
    return [one for one in found if not isinstance(one, ToolkitError)], refused


def _no_arrays(statuses: Sequence[RunStatus]) -> list[ToolkitError]:
    return [
        ToolkitError(f"run {status.run_id} is not an array", where="--tasks", fix=f"`toolkit status {status.run_id}`")
        for status in statuses
        if status.tasks is None
    ]


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option("--rank", default="", metavar="N|all", help="Log of rank N, or of all ranks, instead of the job log.")
@click.option("--node", "nodes", default="", metavar="HOSTS", help="Logs of the ranks on these nodes, such as n[1-4].")
@click.option("--failed", is_flag=True, help="Logs of the failed ranks; for an array, of all failed tasks.")
@click.option("--attempt", type=click.IntRange(min=0), help="Logs of this attempt [the last].")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=0, help="Only the last N lines of each log [all].")
@click.option("--by-time", is_flag=True, help="Merge all logs by the times in their lines.")
@task_option
@print_command_option
def logs(
    run: str, runs: Path | None, follow: bool, rank: str, nodes: str, failed: bool, attempt: int | None, lines: int,
    by_time: bool, task: int | None,
) -> None:  # fmt: skip
    """Print the log of RUN: the job log, which has the supervisor's messages, or the logs of ranks.

    \b
    toolkit logs last -f
    toolkit logs 123_4 --rank all -n 20
    toolkit logs last --failed -n 50
    """
    from toolkit.runs.follow.follow import Follower
    from toolkit.runs.logs.log_choice import LogChoice, choose_logs
    from toolkit.runs.logs.logs import in_blocks, read_by_time, read_logs
    from toolkit.runs.status.state import require_submitted

    if sum((bool(rank), bool(nodes), failed)) > 1:
        raise click.UsageError("--rank, --node and --failed cannot be combined; choose one")
    if follow and (failed or by_time):
        raise click.UsageError(f"{'--failed' if failed else '--by-time'} cannot be combined with -f (live output)")
    directory = _part(run, task, runs)
    choice = LogChoice(rank, nodes, failed, attempt)
    if by_time:
        shown = read_by_time(choose_logs(directory, choice), lines=lines, say=say)
    else:
        if follow:
            require_submitted(directory)
        follower = Follower(directory)
        shown = read_logs(directory, choice, lines=lines, follow=follow, over=follower.is_over, say=say)
    is_empty = True
    try:
        for text in shown if follow or sys.stdout.isatty() else in_blocks(shown):
            echo_log(text)
            is_empty = False
    except KeyboardInterrupt:
        if not follow:
            raise
        name = directory.run_id
        raise InterruptedWaitError(
            f"the run continues; `toolkit logs -f {name}` shows more, `toolkit cancel {name}` ends it"
        ) from None
    if is_empty:
        say(f"the log is empty; `toolkit explain {directory.run_id}` explains the state of the run")


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
def wait(run: str, runs: Path | None) -> None:
    """Wait until RUN ends, and exit with the job's exit code.

    \b
    toolkit wait last && toolkit ckpt ls last
    """
    from toolkit.runs.follow.follow import follow_to_end
    from toolkit.runs.status.state import require_submitted

    directory = find(run, runs)
    require_submitted(directory)
    sys.exit(follow_to_end(directory, plain=is_plain()))


@click.command()
@click.argument("run", type=RUN, nargs=-1, required=True)
@runs_option
@print_command_option
@task_option
def cancel(run: tuple[str, ...], runs: Path | None, task: int | None) -> None:
    """Make each RUN save a checkpoint and exit.

    \b
    toolkit cancel last
    toolkit cancel 123 124_7
    """
    if task is not None and len(run) > 1:
        raise click.UsageError("--task requires a single RUN; pass each task as RUN_T")
    _, refused = for_each(run, lambda name: click.echo(_cancel(_part(name, task, runs, to="cancel"))))
    refuse_at_last(refused)


def _cancel(directory: RunDirectory) -> str:
    """Cancel a run or a task, and report what follows."""
    from toolkit.runs.requests.cancel import cancel_run, cancel_task, what_follows
    from toolkit.terminal.talk import clean

    number, whole = directory.task_number, directory.whole
    status = cancel_run(whole) if number is None else cancel_task(whole, number)
    return clean(what_follows(status))


def _tree(statuses: Sequence[RunStatus], *, as_json: bool) -> None:
    from toolkit.runs.history.tree import lines_of, tree_of

    roots = tree_of(statuses)
    if as_json:
        click.echo(json.dumps([root.as_json() for root in roots], indent=1))
        return
    for line in lines_of(roots):
        click.echo(line)


@click.command()
@runs_option
@json_option
@print_command_option
@click.option("-J", "--job-name", default="", help="List runs of this job.")
@click.option("-t", "--state", "states", multiple=True, type=STATE, help="List runs in this state; may be repeated.")
@click.option("-S", "--since", type=Moment(), help="List runs created since then: 12h, 7d, 2026-11-20.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=50, show_default=True, help="List at most N runs; 0 lists all."
)
@click.option("--tree", is_flag=True, help="Show each run below the one that it follows or repeats, with its resumes.")
def history(
    runs: Path | None, as_json: bool, job_name: str, states: tuple[str, ...], since: datetime | None,
    limit: int, tree: bool,
) -> None:  # fmt: skip
    """List the runs of all known folders, the newest first. RUNS/.cache caches how they ended, and may be removed.

    \b
    toolkit history -n 10
    toolkit history --state failed --since 7d
    """
    from toolkit.rundir.layout import new_run_id
    from toolkit.runs.history.listing import list_runs

    statuses = list_runs(
        folders_of_runs(runs), job=job_name, states=[RunState(state) for state in states],
        since=new_run_id(since) if since else "", limit=limit,
    )  # fmt: skip
    if tree:
        _tree(statuses, as_json=as_json)
    elif as_json:
        click.echo(json.dumps([entry.as_json() for entry in statuses], indent=1))
    else:
        _table(statuses)
