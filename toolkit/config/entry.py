"""Is there anything to run? The check that a user meets before Slurm does."""

from __future__ import annotations

import re

from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError

_FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[^:]*))?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def check_entry(resolved: ResolvedJob) -> None:
    """Check the form of `job.entry`, and that its file exists beside the job file.

    A module is not imported here: that would run the user's code, and torch, on the login node.

    Raises:
        ToolkitError: the form is none of ours, or the file is missing.
    """
    entry = resolved.job.entry
    if isinstance(entry, list):
        return
    where = resolved.origin("job.entry").place("job.entry")
    match = _FILE.fullmatch(entry)
    if match is None:
        if not _MODULE.fullmatch(entry):
            raise ToolkitError(
                f"{entry!r} is no entry",
                where=where,
                fix='write "file.py:main", "file.py", "package.module:main", or a list such as ["./a.out"]',
            )
        return
    function = match["function"]
    if function is not None and not function.isidentifier():
        raise ToolkitError(
            f"{function!r} is no function name", where=where, fix=f'write "{match["file"]}:main"'
        )
    path = resolved.job_directory / match["file"]
    if not path.is_file():
        beside = [one.stem for one in resolved.job_directory.glob("*.py")]
        close = nearest(path.stem, beside)
        fix = (
            f'write "{close[0]}.py"'
            if close
            else f"create it, or give a path relative to {resolved.job_directory}"
        )
        raise ToolkitError(f"there is no file {path}", where=where, fix=fix)
