"""What an attempt learns from earlier ones: whether it continues, from which path, and with which arguments."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.rundir.arguments import NEWEST, expanded
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.log import say

# Read by `world.restart`, and the last one by `rank.entry`.
VARIABLES = ("TOOLKIT_RESTART", "TOOLKIT_LAST_PROGRESS", "TOOLKIT_RESTART_ARGV")


def restart_variables(
    attempt: AttemptDirectory, restart: Mapping[str, Any], files: Mapping[str, tuple[int, int]]
) -> dict[str, str]:
    """Return the variables of the ranks that tell whether and how to continue, and log the arguments that they add.

    `files` is the present state of what `restart.progress` matches.
    """
    more: Sequence[str] = restart.get("argv") or ()
    pattern = restart.get("progress")
    if not _follows_progress(attempt, files, by_files=bool(pattern)):
        if more and attempt.number:
            why = f"restart.progress = {pattern!r} matches no new file" if pattern else "no attempt has reported a step"
            say(f"attempt {attempt.number} starts without restart.argv: {why}")
        return {"TOOLKIT_RESTART": "0"}
    latest = max(files, key=lambda path: (_written_ns(path, files[path][0]), files[path]), default=None)
    newest = os.path.abspath(latest) if latest is not None else None  # noqa: PTH100
    variables = {"TOOLKIT_RESTART": "1"} | ({"TOOLKIT_LAST_PROGRESS": newest} if newest is not None else {})
    added = expanded(more, newest)
    if added:
        say(f"attempt {attempt.number} continues with {shlex.join(added)}")
        variables["TOOLKIT_RESTART_ARGV"] = json.dumps(added)
    elif more:
        say(f"attempt {attempt.number} has no argument of restart.argv: no path for {NEWEST}")
    return variables


def _written_ns(path: str, changed_ns: int) -> int:
    """Return when a file, or the newest file directly in a folder, was written: a deletion changes the time of its folder."""
    if not Path(path).is_dir():
        return changed_ns
    with suppress(FileNotFoundError, PermissionError):  # deleted meanwhile, or of no use to the ranks
        return max((one.stat().st_mtime_ns for one in Path(path).iterdir() if one.is_file()), default=0)
    return 0


def _follows_progress(attempt: AttemptDirectory, files: Mapping[str, tuple[int, int]], *, by_files: bool) -> bool:
    """Return whether an earlier attempt changed a file that `restart.progress` matches, or without that key made a step.

    Steps do not count besides files: a program that has saved nothing yet cannot continue.
    """
    changed_ns = max((changed for changed, _ in files.values()), default=0)
    for earlier in (attempt.run.attempt(number) for number in attempt.run.attempt_numbers() if number < attempt.number):
        end = AttemptRecord.read(earlier)
        if end is None:
            continue
        if end.changed_files or (end.step is not None and not by_files):
            return True
        # Nothing was recorded if the supervisor was killed, or if the key was set later.
        is_unknown = by_files and end.changed_files is None and earlier.start_file.exists()
        if is_unknown and changed_ns > earlier.start_file.stat().st_mtime_ns:
            return True
    return False
