"""`toolkit ckpt`: what checkpoints a run has, what is in them, and whether they are whole."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import json_option, runs_option, site_runs
from toolkit.errors import CHECK_FAILED, NotFoundError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from toolkit.checkpoint.listing import Summary
    from toolkit.checkpoint.manifest import Manifest

step_option = click.option("--step", type=int, help="Only this step.")


@click.group()
def ckpt() -> None:
    """List, show and verify checkpoints. RUN is a run, or a path to a run, checkpoints or step folder."""


@ckpt.command()
@click.argument("run")
@runs_option
@json_option
def ls(run: str, runs: Path | None, as_json: bool) -> None:
    """List a run's checkpoints and what else stands in their folder."""
    summaries = _summaries(run, runs)
    if as_json:
        click.echo(json.dumps([_summary_json(summary) for summary in summaries], indent=2))
        return
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("step", "size", "files", "ranks"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("saved at", no_wrap=True)
    table.add_column("status", overflow="fold")
    for summary in summaries:
        table.add_row(
            summary.path.name if summary.step is None else str(summary.step),
            "" if summary.size_bytes is None else decimal(summary.size_bytes),
            "" if summary.files is None else str(summary.files),
            "" if summary.world_size is None else str(summary.world_size),
            summary.saved_at or "",
            Text(summary.status),
        )
    _print(table)


@ckpt.command()
@click.argument("run")
@runs_option
@step_option
@json_option
def show(run: str, runs: Path | None, step: int | None, as_json: bool) -> None:
    """Show the tensors, their pieces in every shard file, and the state of one checkpoint (the newest)."""
    from toolkit.checkpoint.manifest_file import manifest_text, read_manifest

    folder = _committed(run, runs, step)[-1].path
    manifest = read_manifest(folder)
    if as_json:
        click.echo(json.dumps(json.loads(manifest_text(manifest)), indent=2))
        return
    _print_tree(folder, manifest)


@ckpt.command()
@click.argument("run")
@click.option("--full", is_flag=True, help="Read every byte, not only names, sizes and the manifest.")
@runs_option
@step_option
@json_option
def verify(run: str, full: bool, runs: Path | None, step: int | None, as_json: bool) -> int:
    """Check that checkpoints are whole. Exit code 1 when one is not."""
    from toolkit.checkpoint.verify import verify_fully, verify_quickly

    found = []
    for summary in _committed(run, runs, step):
        _, problems = (verify_fully if full else verify_quickly)(summary.path)
        found.append((summary.path, problems))
    if as_json:
        answer = [
            {"path": str(path), "good": not problems, "problems": [asdict(problem) for problem in problems]}
            for path, problems in found
        ]
        click.echo(json.dumps(answer, indent=2))
    else:
        for path, problems in found:
            click.echo(f"{path}: {'ok' if not problems else 'BAD'}")
            for problem in problems:
                click.echo(f"  {problem}")
    return CHECK_FAILED if any(problems for _, problems in found) else 0


@ckpt.command()
@click.argument("run")
@runs_option
@step_option
def index(run: str, runs: Path | None, step: int | None) -> None:
    """Write index.h5 of one checkpoint (the newest) anew, and print its path."""
    from toolkit.checkpoint.index import write_index
    from toolkit.checkpoint.manifest_file import read_manifest

    folder = _committed(run, runs, step)[-1].path
    click.echo(write_index(folder, read_manifest(folder)))


def _summaries(run: str, runs: Path | None) -> list[Summary]:
    """All checkpoint folders that RUN means; what is no path is looked up below `runs`."""
    from toolkit.checkpoint.listing import checkpoint_folders, summarise

    path = Path(run)
    if not path.is_dir():
        from toolkit.rundir.find import find_run

        path = find_run(run, site_runs(runs))
    return [summarise(folder) for folder in checkpoint_folders(path.absolute())]


def _committed(run: str, runs: Path | None, step: int | None) -> list[Summary]:
    """The committed checkpoints that RUN means, oldest first, damaged ones too; or the named folder."""
    from toolkit.checkpoint.layout import aside_of

    summaries = _summaries(run, runs)
    if aside_of(Path(run)) is not None:
        return summaries
    wanted = [summary for summary in summaries if summary.step is not None and (step is None or summary.step == step)]
    if not wanted:
        have = ", ".join(str(summary.step) for summary in summaries if summary.step is not None)
        raise NotFoundError(
            "there is no committed checkpoint" + ("" if step is None else f" of step {step}"),
            where=run,
            fix=f"choose one of the steps {have}" if have else "wait for the run to save one",
        )
    return wanted


def _summary_json(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "path": str(summary.path), "good": summary.good}


def _print_tree(folder: Path, manifest: Manifest) -> None:
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree(
        escape(
            f"{folder.name}: step {manifest.step}, {manifest.world_size} ranks, "
            f"{decimal(manifest.size_bytes)}, {manifest.saved_at}, attempt {manifest.attempt}, "
            f"{manifest.written_by}"
        )
    )
    for mesh in manifest.mesh:
        tree.add(escape(f"mesh {mesh['dims']} {mesh['shape']}"))
    tensors = tree.add(f"tensors ({len(manifest.tensors)})")
    for name, record in manifest.tensors.items():
        node = tensors.add(escape(f"{name} {record.dtype} {list(record.shape)} {decimal(record.size_bytes)}"))
        for piece in record.pieces:
            node.add(escape(f"{list(piece.shape)} at {list(piece.offset)} in {piece.file}, byte {piece.byte_offset}"))
    values = tree.add(f"values ({len(manifest.objects)})")
    for name, value in manifest.objects.items():
        values.add(escape(f"{name} = {value.value!r}"))
    state = tree.add("state")
    for key, item in manifest.state.items():
        state.add(escape(f"{key} = {item!r}"))
    _print(tree)


def _print(what: Table | Tree) -> None:
    """Wrap at the terminal's width, and not at all into a file or a pipe."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(what)
