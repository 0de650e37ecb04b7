"""Tidy up after a completed array task: copy the output of its ranks to Slurm's log, and remove most of its files.

A task that did not complete keeps all its files, so that the user can find the reason.
"""

import os
import sys
from pathlib import Path

from toolkit.rundir.layout import RunDirectory, rank_of
from toolkit.rundir.rank_logs import is_shared, label_of
from toolkit.rundir.task_files import keep_the_end
from toolkit.supervise.log import say

MOST_BYTES = 16 << 20  # longer logs are not copied and stay in the task folder


def tidy_done_task(task: RunDirectory, start: int, job_id: str) -> None:
    """Reduce the files of a completed task to the record of its end, its events and one log.

    Does nothing if standard output is not Slurm's log in the run directory: `-o` may redirect it to a file that toolkit
    does not read.
    """
    attempt = task.last_attempt()
    assert attempt is not None  # a completed task has an attempt
    try:
        logs = [path for path in sorted(attempt.logs.iterdir()) if path.stat().st_size]
        too_long = sum(path.stat().st_size for path in logs) > MOST_BYTES
        if too_long or not _is_our_output(task.whole.path / f"slurm-{job_id}.out"):
            return
        for path in logs:
            _print(path)
        keep_the_end(task, attempt, start, lambda error: say(f"cannot keep {error.where}: {error.message}"))
    except OSError as error:
        say(f"cannot remove files from the task folder: {error}")


def _is_our_output(log: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), log.stat())
    except (OSError, ValueError):
        return False


def _print(log: Path) -> None:
    label = "" if is_shared(log) else label_of(rank_of(log))
    with log.open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
        for line in stream:
            sys.stdout.buffer.write(f"{label}{line.rstrip(chr(10))}\n".encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
