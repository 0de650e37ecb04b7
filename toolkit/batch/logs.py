"""The logs of a run: Slurm's file with the supervisor's words, and one file a rank, read line by line."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.batch.job_log import job_log
from toolkit.batch.state import newest_job_id
from toolkit.errors import NotFoundError
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, rank_of
from toolkit.supervise.failures import clean

FOLLOW_PERIOD_S = 0.3
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")


def log_paths(run: RunDirectory, *, rank: str | None = None, attempt: int | None = None) -> list[Path]:
    """The files to read: the supervisor's log, or one rank's, or (`all`) every rank's, of the last attempt or a named one.

    Raises:
        NotFoundError: there is no such log yet; those that exist are named.
    """
    if rank is None and attempt is None:
        return _of_jobs(run)
    numbers = run.attempt_numbers()
    if not numbers and run.task_numbers():
        raise NotFoundError(
            f"the ranks of an array run write by task, and run {run.run_id} is an array",
            where=str(run.path),
            fix=f"give --task T too; `toolkit status {run.run_id} --json` lists the tasks",
        )
    if not numbers:
        raise NotFoundError(
            "no attempt has begun",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id}` says what the run waits for",
        )
    if attempt is not None and attempt not in numbers:
        raise NotFoundError(
            f"no attempt {attempt}", where=str(run.path), fix=f"give --attempt {numbers[0]} to {numbers[-1]}"
        )
    return _of_ranks(run.attempt(numbers[-1] if attempt is None else attempt), rank or "all")


def _of_jobs(run: RunDirectory) -> list[Path]:
    """What Slurm writes of a run's jobs, the newest last; also where the newest one's `-o` put it, if this host sees that."""
    # Slurm opens the logs of an array's tasks in the run's own folder: slurm-ARRAY_TASK.out.
    end = "" if run.task_number is None else f"_{run.task_number}"
    found = set(run.whole.path.glob(f"slurm-*{end}.out"))
    job_id = newest_job_id(run)
    log = job_log(run, job_id) if job_id else None
    if log is not None and log.path is not None and log.path.is_file():
        found.add(log.path)
    if not found:
        elsewhere = f"its log is where -o put it: {log.place}; " if log is not None and log.redirected else ""
        raise NotFoundError(
            "no log yet",
            where=str(run.path),
            fix=f"{elsewhere}`toolkit status {run.run_id}` says what the run waits for",
        )
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _of_ranks(attempt: AttemptDirectory, rank: str) -> list[Path]:
    paths = rank_logs(attempt)
    if rank == "all":
        return paths
    if rank.isdecimal() and attempt.log_file(int(rank)) in paths:
        return [attempt.log_file(int(rank))]
    known = [path.stem.removeprefix("rank-") for path in paths]
    raise NotFoundError(
        f"no log of rank {rank}",
        where=str(attempt.logs),
        fix=f"give --rank {known[0]} to {known[-1]}, or all" if known else "wait until the ranks have started",
    )


def rank_logs(attempt: AttemptDirectory) -> list[Path]:
    """The logs of an attempt's ranks, by rank."""
    return sorted(attempt.logs.glob("rank-*.log"), key=rank_of)


def rank_label(path: Path) -> str:
    """What stands before each line where several ranks are shown."""
    return f"[{path.stem.removeprefix('rank-')}] "


def for_terminal(line: str) -> str:
    """A program's line as a terminal may have it: its colours, without other escapes, which could move the cursor, set
    the title or answer as a keyboard. Of a progress bar's many states the last one stays.
    """
    parts = _COLOUR.split(line.rstrip("\r").rpartition("\r")[2])  # every second part is a colour
    shown = "".join(part if place % 2 else clean(part) for place, part in enumerate(parts))
    return shown + "\x1b[0m" if len(parts) > 1 else shown


@dataclass
class LogReader:
    """Reads what was appended to some files since the last look, whole lines only."""

    label: Callable[[Path], str]
    offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, paths: list[Path], *, to_the_end: bool = False) -> Iterator[str]:
        """`to_the_end` also takes a last line without its end, where nothing more will come."""
        for path in paths:
            with path.open("rb") as stream:
                stream.seek(self.offsets.get(path, 0))
                for line in stream:
                    if not line.endswith(b"\n") and not to_the_end:
                        break
                    self.offsets[path] = self.offsets.get(path, 0) + len(line)
                    yield self.label(path) + line.decode("utf-8", errors="replace").rstrip("\n")


def read_logs(
    run: RunDirectory, *, rank: str | None, attempt: int | None, lines: int, follow: bool, over: Callable[[], bool]
) -> Iterator[str]:
    """The last `lines` lines of each log (0: all), then, with `follow`, what is added until `over()`.

    Several ranks' lines are numbered. `follow` waits for a log that is not there yet.

    Raises:
        NotFoundError: there is no such log, and none can come any more.
    """
    reader = LogReader(rank_label if rank == "all" or (rank is None and attempt is not None) else lambda _: "")
    first = True
    while True:
        done = not follow or over()  # asked before the read: what was written before the end is still printed
        try:
            paths = log_paths(run, rank=rank, attempt=attempt)
        except NotFoundError:
            if done:
                raise
            paths = []
        for path in paths:
            added = reader.read([path], to_the_end=done)
            yield from deque(added, maxlen=lines) if first and lines else added
        if done:
            return
        first = first and not paths
        time.sleep(FOLLOW_PERIOD_S)
