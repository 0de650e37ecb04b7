"""What a task of an array that is done keeps: how it ended, its events, the end of its start, and Slurm's log.

Everything else of 1,000 tasks would be 10,000 files. How the attempt began stands in its `exit.json` then, and who had
claimed the start in its `end.json`.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.rundir.files import read_json, read_json_or_none, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

_OF_THE_ATTEMPT = ("start.json", "heartbeat", "rendezvous.json", "stop", "ends_at")


def read_begun(attempt: AttemptDirectory) -> dict[str, Any] | None:
    """`start.json` of an attempt, which `exit.json` has taken in where its task is done; None before it has begun."""
    begun: dict[str, Any] | None = read_json_or_none(attempt.start_file)
    if begun is None:
        begun = (read_json_or_none(attempt.exit_file) or {}).get("begun")
    return begun


def keep_the_end(task: RunDirectory, attempt: AttemptDirectory, start: int) -> None:
    """Remove what nobody asks for of a task that is done; first of all is written what must not be lost."""
    if attempt.start_file.exists():
        write_json(attempt.exit_file, {**read_json(attempt.exit_file), "begun": read_json(attempt.start_file)})
    folder = task.start(start)
    if (folder / "claim.json").exists():
        write_json(folder / "end.json", {**read_json(folder / "claim.json"), **read_json(folder / "end.json")})
    for path in (folder / "claim.json", folder / "job.json", *(attempt.path / name for name in _OF_THE_ATTEMPT)):
        path.unlink(missing_ok=True)
    for path in (attempt.ranks, attempt.logs, attempt.usage):
        shutil.rmtree(path, ignore_errors=True)
    for path in (attempt.errors, task.checkpoints, task.metrics):
        _remove_empty(path)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
