"""Removes most files of a finished array task, because 1,000 tasks would otherwise leave 10,000 files.

Its `exit.json`, its events, the `end.json` of its start, and the Slurm log remain. `exit.json` then also contains the
start record of the attempt and the usage of its nodes, and `end.json` also contains the claim of the start.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.files import check_kept_usage, read_json, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

__all__ = ["keep_the_end", "read_usage"]

_OF_THE_ATTEMPT = ("start.json", "heartbeat", "rendezvous.json", "stop", "ends_at", "matched_files.json")


def read_usage(attempt: AttemptDirectory, leave_out: Callable[[ToolkitError], None]) -> list[dict[str, Any]]:
    """Return the resource usage of each node of an attempt, from `exit.json` if its task is finished.

    `leave_out` is called with the error for each damaged file: usage files are written without fsync, so that a lost
    node may leave incomplete ones.
    """
    usage: list[dict[str, Any]] = []
    for path in sorted(attempt.usage.glob("rank-*.json")):
        try:
            usage.append(read_json(path))
        except ToolkitError as error:
            leave_out(error)
    if usage:
        return usage
    end = AttemptRecord.read(attempt)
    kept = end.usage if end is not None else []
    check_kept_usage(kept, str(attempt.exit_file))
    return kept


def keep_the_end(
    task: RunDirectory, attempt: AttemptDirectory, start: int, leave_out: Callable[[ToolkitError], None]
) -> None:
    """Remove the unneeded files of a finished task after copying what must remain; `leave_out` as in `read_usage`."""
    end = AttemptRecord.read(attempt)
    if end is None:
        return
    if attempt.start_file.exists():
        replace(end, begun=StartRecord.read(attempt), usage=read_usage(attempt, leave_out)).write(attempt)
    folder = task.start(start)
    if (folder / "claim.json").exists():
        write_json(folder / "end.json", {**read_json(folder / "claim.json"), **read_json(folder / "end.json")})
    for path in (folder / "claim.json", folder / "job.json", *(attempt.path / name for name in _OF_THE_ATTEMPT)):
        path.unlink(missing_ok=True)
    for path in (attempt.ranks, attempt.logs, attempt.usage):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(task.outbox.with_name("sent"), ignore_errors=True)
    for path in (attempt.errors, task.checkpoints, task.metrics, task.outbox, task.outbox.parent):
        _remove_empty(path)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
