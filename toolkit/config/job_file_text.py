"""Write the job file that submits a resolved job again."""

import os
from pathlib import Path
from typing import Any

from toolkit.config.amend import what_was_set
from toolkit.config.resolved import ResolvedJob

__all__ = ["job_file_text", "moved_entry"]


def job_file_text(job: ResolvedJob, folder: Path | None = None) -> str:
    """Return a job file with all values of the job's file and of the command line, the arguments after `--` included.

    `folder` is that of the file, to which the entry is relative; None is the folder of the job.
    """
    import tomlkit  # slow to import

    tables: dict[str, Any] = {}
    for setting in what_was_set(job):
        if setting.origin.layer in ("job", "flag") or setting.path == ("job", "name"):
            table = tables
            for part in setting.path[:-1]:
                table = table.setdefault(part, {})
            table[setting.path[-1]] = setting.value
    if folder is not None:
        tables["job"]["entry"] = moved_entry(job.job.entry, job.job_directory, folder)
    if job.arguments:
        tables["job"]["argv"] = job.arguments
    return tomlkit.dumps(tables)


def moved_entry(entry: str | list[str], before: Path, folder: Path) -> str | list[str]:
    """Return the entry of a job file in `before` for a job file in `folder`."""
    if isinstance(entry, str):
        is_file = "/" in entry or entry.partition(":")[0].endswith(".py")  # else a module
        return os.path.relpath(before / entry, folder) if is_file and not entry.startswith("/") else entry
    if "/" not in entry[0] or entry[0].startswith("/"):
        return entry
    return [f"./{os.path.relpath(before / entry[0], folder)}", *entry[1:]]
