"""`toolkit ckpt`: list and verify checkpoints. Its other commands are in the modules `ckpt_*`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.ckpt_convert import export, import_
from toolkit.cli.ckpt_diff import diff
from toolkit.cli.ckpt_places import all_folders, changing, committed_folders, manifest_of, one_folder
from toolkit.cli.ckpt_print import reading_bar, size, speed
from toolkit.cli.ckpt_prune import prune
from toolkit.cli.ckpt_show import show
from toolkit.cli.options import RUN_OR_STEP, json_option, runs_option
from toolkit.errors import CHECK_FAILED, OWN_FAILURE, ToolkitError
from toolkit.terminal.talk import plain, print_table

if TYPE_CHECKING:
    from toolkit.checkpoint.folder.listing import Summary
    from toolkit.checkpoint.folder.verify import Problem
    from toolkit.checkpoint.format.manifest import Manifest

PROBLEMS_SHOWN = 20  # for each checkpoint; --json prints all of them

step_option = click.option("--step", type=click.IntRange(min=0), help="Select the checkpoint of this step.")


class CheckpointCommands(click.Group):
    """A group that reports a system error of any of its commands with the place and the fix."""

    def invoke(self, ctx: click.Context) -> Any:
        from toolkit.rundir.files import is_unwritable

        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None or is_unwritable(error):
                raise
            from toolkit.checkpoint.errors import host_cannot_read

            raise host_cannot_read(error, Path(str(error.filename))) from None


@click.group(cls=CheckpointCommands)
def ckpt() -> None:
    """List, show, verify, compare, prune, export and import checkpoints.

    RUN is a run, RUN:STEP, or a path to a run, a checkpoints folder or one checkpoint.

    \b
    toolkit ckpt ls last
    """


@ckpt.command()
@click.argument("run", type=RUN_OR_STEP)
@runs_option
@step_option
@json_option
def ls(run: str, runs: Path | None, step: int | None, as_json: bool) -> None:
    """List the checkpoints of a run, and the other folders next to them.

    \b
    toolkit ckpt ls last
    """
    from toolkit.checkpoint.folder.listing import summarise

    summaries = [summarise(folder) for folder in all_folders(run, runs, step)]
    if as_json:
        click.echo(json.dumps([_summary_json(summary) for summary in summaries], indent=2))
        return
    from toolkit.checkpoint.advice import advice_lines

    print_table(
        ("STEP", "SIZE", "FILES", "RANKS", "SAVED_AT", "STATUS"), map(_row, summaries),
        shed=("RANKS", "FILES", "SAVED_AT", "SIZE"),
    )  # fmt: skip
    for line in advice_lines(summaries[0].path.parent.parent):
        click.echo(plain(line), err=True)


def _row(summary: Summary) -> tuple[str, ...]:
    """Return one line of the list."""
    return (
        plain(summary.path.name) if summary.step is None else str(summary.step),
        "" if summary.size_bytes is None else size(summary.size_bytes),
        "" if summary.files is None else str(summary.files),
        "" if summary.world_size is None else str(summary.world_size),
        plain(summary.saved_at or ""),
        plain(summary.status),
    )


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "path": str(summary.path), "good": summary.good}


@dataclass
class Verified:
    """The result of checking one checkpoint. `unknown` is the reason if it could not be checked, else ""."""

    path: Path
    problems: list[Problem]
    read_bytes: int = 0
    seconds: float = 0.0
    unknown: str = ""

    @property
    def verdict(self) -> str:
        """The verdict in words: `ok`, `BAD` or `not checked`."""
        if self.unknown:
            return "not checked"
        return "BAD" if self.problems else "ok"

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `ckpt verify --json`."""
        return {
            "path": str(self.path),
            "good": not self.problems and not self.unknown,
            "problems": [asdict(problem) for problem in self.problems],
            "unknown": self.unknown,
            "read_bytes": self.read_bytes,
            "seconds": round(self.seconds, 3),
        }


@ckpt.command()
@click.argument("run", type=RUN_OR_STEP)
@click.option("--full", is_flag=True, help="Read every byte, not only names, sizes and the manifest.")
@runs_option
@step_option
@json_option
def verify(run: str, full: bool, runs: Path | None, step: int | None, as_json: bool) -> int:
    """Check that checkpoints are complete. Exit code 1 if one is damaged, 125 if one could not be read.

    \b
    toolkit ckpt verify last --full
    """
    results = []
    for folder in committed_folders(run, runs, step):
        results.append(_verified(folder, full=full))
        if not as_json:
            _print_verified(results[-1], full=full)
    if as_json:
        click.echo(json.dumps([result.as_json() for result in results], indent=2))
    elif len(results) > 1:
        _print_counts(results, full=full)
    if any(result.problems for result in results):
        return CHECK_FAILED
    return OWN_FAILURE if any(result.unknown for result in results) else 0


def _verified(folder: Path, *, full: bool) -> Verified:
    from toolkit.checkpoint.folder.verify import verify_quickly

    answer = Verified(folder, [])
    began = time.monotonic()
    try:
        manifest, answer.problems = verify_quickly(folder)
        if full and manifest is not None:
            _read_all(answer, manifest)
    except ToolkitError as error:
        answer.unknown = str(error)
    answer.seconds = time.monotonic() - began
    if answer.problems and not folder.exists():
        answer.problems, answer.unknown = [], "the checkpoint was removed during the check"
    return answer


def _read_all(answer: Verified, manifest: Manifest) -> None:
    """Check every byte in several threads, and count the bytes read."""
    import threading

    from toolkit.checkpoint.folder.verify import verify_bytes

    lock = threading.Lock()
    bad = {problem.file for problem in answer.problems}
    with reading_bar(answer.path.name, manifest.size_bytes) as advance:

        def read(count: int) -> None:
            with lock:
                answer.read_bytes += count
            advance(count)

        answer.problems += verify_bytes(answer.path, manifest, bad, read)


def _print_verified(one: Verified, *, full: bool) -> None:
    read = f" (read {speed(one.read_bytes, one.seconds)})" if full and not one.unknown else ""
    click.echo(plain(f"{one.path}: {one.verdict}{read}"))
    if one.unknown:
        click.echo(plain(f"  {one.unknown}"))
    for problem in one.problems[:PROBLEMS_SHOWN]:
        click.echo(plain(f"  {problem}"))
    if len(one.problems) > PROBLEMS_SHOWN:
        click.echo(f"  and {len(one.problems) - PROBLEMS_SHOWN} more; --json lists all")


def _print_counts(results: list[Verified], *, full: bool) -> None:
    verdicts = [result.verdict for result in results]
    known = ("ok", "BAD", "not checked")
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in known if verdict in verdicts)
    read = speed(sum(result.read_bytes for result in results), sum(result.seconds for result in results))
    click.echo(f"{len(results)} checkpoints: {counts}" + (f"; read {read}" if full else ""))


@ckpt.command()
@click.argument("run", type=RUN_OR_STEP)
@runs_option
@step_option
def index(run: str, runs: Path | None, step: int | None) -> None:
    """Rewrite index.h5 of one checkpoint (the newest), and print its path.

    \b
    toolkit ckpt index last
    """
    from toolkit.checkpoint.format.index import write_index
    from toolkit.checkpoint.format.layout import INDEX

    folder = one_folder(run, runs, step)
    manifest = manifest_of(folder)
    with changing(folder / INDEX, "written", when_full="free disk space, for example with `toolkit ckpt prune RUN`"):
        click.echo(write_index(folder, manifest))


ckpt.add_command(show)
ckpt.add_command(diff)
ckpt.add_command(prune)
ckpt.add_command(export)
ckpt.add_command(import_)
