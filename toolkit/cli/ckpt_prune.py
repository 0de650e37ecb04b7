"""`toolkit ckpt prune`: remove checkpoints that retention does not keep, and leftovers of interrupted saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.ckpt_places import changing, folder_of, with_step
from toolkit.cli.ckpt_print import size
from toolkit.cli.options import RUN_OR_STEP, json_option, print_command_option, runs_option
from toolkit.errors import OWN_FAILURE, CheckFailedError, ToolkitError
from toolkit.terminal.talk import plain, say

if TYPE_CHECKING:
    from toolkit.checkpoint.folder.prune import CompletenessCheck, Removal
    from toolkit.checkpoint.folder.retention import Retention
    from toolkit.rundir.layout import RunDirectory


@dataclass(frozen=True)
class Place:
    """A `checkpoints` folder, and its run if it has one."""

    directory: Path
    run: RunDirectory | None

    def attempts(self) -> list[int]:
        """Return the numbers of the run's attempts."""
        return self.run.attempt_numbers() if self.run is not None else []


@click.command()
@click.argument("run", type=RUN_OR_STEP)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N newest [as the run does].")
@click.option(
    "--keep-every", type=click.IntRange(min=0), metavar="N", help="Keep every step divisible by N [as the run does]."
)
@click.option(
    "--keep-best", type=click.IntRange(min=0), metavar="N", help="Keep the N with the best metric [as the run does]."
)
@click.option("--aside", is_flag=True, help="Also remove archived folders: .bad, .left and .aside.")
@click.option("--full", is_flag=True, help="Read every byte of the kept checkpoints before removing any.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@runs_option
@json_option
@print_command_option
def prune(
    run: str, keep_last: int | None, keep_every: int | None, keep_best: int | None, aside: bool, full: bool,
    dry_run: bool, runs: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Remove the checkpoints of RUN that are not kept, and leftovers of interrupted saves.

    By default this keeps what the run itself keeps ([checkpoint] in its job file). Only checkpoints that pass a check
    count as kept: a quick check (names, sizes, manifests), or with --full a check of every byte.

    \b
    toolkit ckpt prune last --dry-run
    toolkit ckpt prune last --keep-last 2
    """
    from toolkit.checkpoint.folder.prune import CompletenessCheck, removals

    _refuse_step(run)
    place = _place(folder_of(run, runs, changes=not dry_run))
    options = {"last": keep_last, "every": keep_every, "best": keep_best}
    retention, source = _retention(place, {key: value for key, value in options.items() if value is not None})
    if not dry_run:
        _refuse_running(place)
    check = CompletenessCheck(full=full, before_reading=lambda folder: say(f"reading all of {folder.name}"))
    planned = removals(place.directory, retention, source, unfinished=place.run is not None, aside=aside, check=check)
    left = [] if dry_run else _remove(place, planned)
    _print(place, planned, left, check, dry_run=dry_run, as_json=as_json)
    return OWN_FAILURE if left else 0


def _refuse_step(named: str) -> None:
    run, step = with_step(named)
    if step is not None:
        raise ToolkitError("expected a run, got one of its steps", where=named, fix=f"`toolkit ckpt prune {run}`")


def _place(path: Path) -> Place:
    """Return the `checkpoints` folder of a path, with its run if it has one.

    Raises:
        NotFoundError: there is no checkpoint.
        ToolkitError: it is one checkpoint.
    """
    from toolkit.checkpoint.folder.listing import checkpoint_folders, is_checkpoint_folder
    from toolkit.rundir.layout import RunDirectory

    if is_checkpoint_folder(path):
        raise ToolkitError("expected a run, got a single checkpoint", where=str(path), fix=f"pass {path.parent}")
    checkpoint_folders(path)
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    run = RunDirectory(directory.parent)
    is_of_run = directory.name == "checkpoints" and run.record.exists()
    return Place(directory, run if is_of_run else None)


def _retention(place: Place, given: dict[str, Any]) -> tuple[Retention, Path | None]:
    """Return the retention, and the checkpoint that the run started from, if the user set one.

    Raises:
        ToolkitError: the number of checkpoints to keep is unknown.
    """
    from toolkit.checkpoint.folder.retention import Retention

    if place.run is None:
        if "last" not in given:
            message = "the folder does not belong to a run that defines what to keep"
            raise ToolkitError(message, where=str(place.directory), fix="pass --keep-last")
        return Retention(**given), None
    from toolkit.runs.record.job import recorded_job

    settings = recorded_job(place.run.whole).checkpoint
    return replace(Retention.of(settings), **given), Path(settings.source) if settings.source else None


def _refuse_running(place: Place) -> None:
    """Refuse an active run: its ranks remove and save checkpoints, and may resume from an old one.

    Raises:
        CheckFailedError: the run is active, or its state is unknown.
    """
    if place.run is None:
        return
    from toolkit.rundir.states import RunState
    from toolkit.runs.status.state import run_status
    from toolkit.runs.status.state_table import state_phrase

    status = run_status(place.run)
    if not status.state.final and status.state is not RunState.CREATED:
        name = place.run.run_id
        raise CheckFailedError(
            f"run {name} {state_phrase(status.state)} ({status.reason})",
            where=str(place.directory),
            fix=f"wait until the run ends, or `toolkit cancel {name}`; --dry-run shows what would be removed",
        )


def _remove(place: Place, planned: Sequence[Removal]) -> list[Removal]:
    """Remove the folders, and return those with remaining files.

    Raises:
        CheckFailedError: the run was started again in the meantime.
        ToolkitError: this user may not remove them.
    """
    from toolkit.checkpoint.folder.prune import remove

    attempts = place.attempts()
    left = []
    for removal in planned:
        if place.attempts() != attempts:
            message = "the run was started again in the meantime"
            raise CheckFailedError(message, where=str(place.directory), fix="prune the run when it has ended")
        when_full = f"the disk is too full to rename the folder first: `rm -r {removal.folder}`"
        try:
            with changing(removal.folder, "removed", when_full=when_full):
                if not remove(removal, max(attempts, default=0)):
                    left.append(removal)
        except FileNotFoundError:
            continue  # another process has removed it
    return left


def _print(
    place: Place,
    planned: Sequence[Removal],
    left: Sequence[Removal],
    check: CompletenessCheck,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from toolkit.checkpoint.format.layout import committed_steps

    gone = {removal.folder for removal in planned} - {removal.folder for removal in left}
    kept = [step for step, folder in committed_steps(place.directory).items() if folder not in gone]
    if as_json:
        answer: dict[str, Any] = {
            "directory": str(place.directory),
            "dry_run": dry_run,
            "look": "full" if check.full else "quick",
            "damaged": [{"path": str(folder), "what": problem} for folder, problem in check.damaged.items()],
            "removed": [
                {"path": str(one.folder), "why": one.why, "size_bytes": one.size_bytes, "left": one in left}
                for one in planned
            ],
            "steps": kept,
        }
        click.echo(json.dumps(answer, indent=2))
        return
    for folder, problem in check.damaged.items():
        click.echo(plain(f"{folder.name}: does not count as kept: {problem}"))
    for one in planned:
        click.echo(
            plain(f"{one.folder.name}: {size(one.size_bytes)}, {one.why}") + (": NOT DELETED" if one in left else "")
        )
    freed = sum(one.size_bytes for one in planned if one not in left)
    count = len(planned) - len(left)
    folders = "1 folder" if count == 1 else f"{count} folders"
    steps = ", ".join(map(str, kept)) or "none"
    quick = "names, sizes and manifests; --full checks every byte"
    click.echo(f"checked {'every byte' if check.full else quick}")
    click.echo(f"{'would remove' if dry_run else 'removed'} {folders}, {size(freed)}; steps kept: {steps}")
