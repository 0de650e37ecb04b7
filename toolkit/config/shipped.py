"""JOB on the command line: the path of a job file, or the name of a shipped job."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.find import typed_path


def shipped_jobs() -> dict[str, Path]:
    """Return the job files that come with toolkit, by name."""
    return {
        path.stem: path
        for folder in import_module("toolkit.jobs").__path__
        for path in sorted(Path(folder).glob("*.toml"))
    }


def find_job(name_or_path: str) -> Path:
    """Return the job file that JOB means; an existing file takes precedence over a shipped job of the same name.

    Raises:
        NotFoundError: neither a file nor a shipped job; the message suggests a similar name.
        ToolkitError: the path is a folder, a device or a pipe.
    """
    from toolkit.config.table import nearest  # the checks of tables are heavy, and names alone need none

    path = typed_path(name_or_path)
    if path.is_file():
        return path.absolute()
    if path.exists() and ("/" in name_or_path or name_or_path.endswith(".toml")):
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ToolkitError(
            f"expected a job file, got {kind}", where=str(path.absolute()), fix="specify the path of a job file"
        )
    shipped = shipped_jobs()
    if name_or_path in shipped:
        return shipped[name_or_path]
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        beside = [one.stem for one in path.absolute().parent.glob("*.toml")]
        close = nearest(path.stem, beside)  # the suffix would make all names similar
        fix = f"use {path.parent / close[0]}.toml" if close else "specify the path of a job file"
        raise NotFoundError("job file not found", where=str(path.absolute()), fix=fix)
    if (beside_it := Path(f"{path}.toml")).is_file():
        fix = f"write ./{beside_it}"
        raise NotFoundError(f"{name_or_path!r} is neither a file nor a shipped job", fix=fix)
    close = nearest(name_or_path, shipped)
    fix = (
        f"write {close[0]!r}"
        if close
        else "specify the path of a job file" + (f", or one of {', '.join(shipped)}" if shipped else "")
    )
    raise NotFoundError(f"{name_or_path!r} is neither a file nor a shipped job", fix=fix)
