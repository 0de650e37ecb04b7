"""Output of the `ckpt` commands: tables and trees at the terminal's width, bars only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from toolkit.terminal.talk import plain

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

_LONGEST_VALUE = 200  # maximum number of characters; --json prints all of them


def print_out(what: Table | Tree) -> None:
    """Print, wrapped at the terminal's width; to a file or pipe, without wrapping or trailing spaces."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(what)
        return
    console = Console(highlight=False, width=100_000, color_system=None)
    with console.capture() as capture:
        console.print(what)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def shortened(value: object) -> str:
    """Return a value's repr, shortened if long."""
    shown = plain(repr(value))
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}... ({len(shown)} characters)"


def size(count: int) -> str:
    """Format a number of bytes, such as 1.2 GB."""
    from rich.filesize import decimal

    return decimal(count)


def speed(count: int, seconds: float) -> str:
    """Format a size with its time and rate: `1.2 GB in 0.4 s, 3.0 GB/s`."""
    return f"{size(count)} in {seconds:.{1 if seconds >= 0.1 else 3}f} s, {size(int(count / max(seconds, 1e-6)))}/s"


@contextmanager
def reading_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal; the yielded function adds to the bytes read."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from toolkit.terminal.progress import PlainBarColumn
    from toolkit.terminal.talk import is_plain

    drawn = PlainBarColumn() if is_plain() else BarColumn()
    columns = ("{task.description}", drawn, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True, color_system=None if is_plain() else "auto")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(plain(what), total=total_bytes)
        yield lambda count: progress.advance(task, count)
