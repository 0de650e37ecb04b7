"""The logs of a run: Slurm's file with the supervisor's words, and one file a rank, read without loading them whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import NotFoundError
from toolkit.rundir.files import tail_text
from toolkit.rundir.layout import RunDirectory

FOLLOW_PERIOD_S = 0.3


def log_paths(run: RunDirectory, *, rank: str | None = None, attempt: int | None = None) -> list[Path]:
    """The files to read: the supervisor's log, or one rank's, or (`all`) every rank's, of the last attempt or a named one.

    Raises:
        NotFoundError: there is no such log yet; those that exist are named.
    """
    if rank is None and attempt is None:
        paths = sorted(run.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
        if not paths:
            raise NotFoundError(
                "no log yet",
                where=str(run.path),
                fix=f"`toolkit status {run.run_id}` says what the run waits for",
            )
        return paths
    numbers = run.attempt_numbers()
    if not numbers or (attempt is not None and attempt not in numbers):
        there = f"attempts {numbers[0]} to {numbers[-1]}" if numbers else "no attempt has begun"
        raise NotFoundError(
            f"no attempt {attempt if attempt is not None else ''}".rstrip(), where=str(run.path), fix=there
        )
    folder = run.attempt(numbers[-1] if attempt is None else attempt).logs
    if rank is None or rank == "all":
        return sorted(folder.glob("rank-*.log"), key=lambda path: int(path.stem.split("-")[1]))
    path = folder / f"rank-{rank}.log"
    if not rank.isdigit() or not path.exists():
        known = sorted(int(entry.stem.split("-")[1]) for entry in folder.glob("rank-*.log"))
        raise NotFoundError(
            f"no log of rank {rank}",
            where=str(folder),
            fix=f"ranks {known[0]} to {known[-1]}" if known else "none yet",
        )
    return [path]


@dataclass
class LogReader:
    """Reads what was appended to some files since the last look, whole lines only."""

    label: Callable[[Path], str]
    offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, paths: list[Path]) -> Iterator[str]:
        for path in paths:
            offset = self.offsets.get(path, 0)
            with path.open("rb") as stream:
                stream.seek(offset)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    yield self.label(path) + line.decode("utf-8", errors="replace").rstrip("\n")
            self.offsets[path] = offset


def read_logs(
    run: RunDirectory,
    *,
    rank: str | None,
    attempt: int | None,
    lines: int,
    follow: bool,
    over: Callable[[], bool],
) -> Iterator[str]:
    """The last `lines` lines of each log (0: all), then, with `follow`, what is added until `over()`."""
    paths = log_paths(run, rank=rank, attempt=attempt)
    several = len(paths) > 1 and rank == "all"
    reader = LogReader(lambda path: f"[{path.stem.removeprefix('rank-')}] " if several else "")
    if lines:
        for path in paths:
            yield from (reader.label(path) + line for line in tail_text(path, lines))
            reader.offsets[path] = path.stat().st_size
    else:
        yield from reader.read(paths)
    while follow:
        done = over()  # asked before the read: what was written before the end is still printed
        yield from reader.read(log_paths(run, rank=rank, attempt=attempt))
        if done:
            return
        time.sleep(FOLLOW_PERIOD_S)
