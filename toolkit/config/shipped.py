"""Find job files and site files, those that ship with toolkit and those of the user; read the user's defaults."""

import os
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from toolkit.config.document import Document, dotted, leaves, read_document
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import typed_path

__all__ = ["find_job", "partitions_in", "read_user_defaults", "shipped_jobs", "site_files"]

# JOB is a path if it has one of these endings.
_OF_FILES = (".toml", ".py", ".R", ".r", ".jl", ".sh", ".sbatch", ".ipynb", ".txt")
# The keys of `~/.config/toolkit/config.toml`.
_USER_KEYS = ("job.account", "job.partition", "job.qos", "notify", "alerts")  # with all keys of these tables


def shipped_jobs() -> dict[str, Path]:
    """Return the job files that ship with toolkit, by name."""
    return {
        path.stem: path
        for folder in import_module("toolkit.jobs").__path__
        for path in sorted(Path(folder).glob("*.toml"))
    }


def find_job(name_or_path: str) -> Path:
    """Return the job file for the argument JOB; an existing file takes precedence over a shipped job of the same name.

    Raises:
        NotFoundError: JOB is neither a file nor a shipped job; the fix suggests a similar name.
        ToolkitError: the path is a folder, a device or a pipe.
    """
    path = typed_path(name_or_path)
    if path.is_file():
        return path.absolute()
    from toolkit.config.program_document import is_program  # imports pydantic, which is slow and rarely needed here
    from toolkit.config.table import nearest

    if is_program(path):  # the function of a file
        return path.absolute()
    ending = path.suffix.partition(":")[0]
    is_path = "/" in name_or_path or ending in _OF_FILES
    shipped = shipped_jobs()
    if path.exists() and (is_path or name_or_path not in shipped):
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ToolkitError(
            f"expected a job file, got {kind}", where=str(path.absolute()), fix="specify the path of a job file"
        )
    if name_or_path in shipped:
        return shipped[name_or_path]
    if is_path:
        suffix = ending if ending in _OF_FILES else ".toml"
        beside = [one.stem for one in path.absolute().parent.glob(f"*{suffix}")]
        close = nearest(path.stem, beside)  # compare stems, since .toml would make all names similar
        fix = f"use {path.parent / close[0]}{suffix}" if close else "specify the path of a job file or a program"
        kind = "job file" if suffix == ".toml" else "file"
        raise NotFoundError(f"{kind} not found", where=str(path.absolute()), fix=fix)
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


def site_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders that may contain site files, in search order."""
    own = [typed_path(part) for part in environ.get("TOOLKIT_SITES", "").split(os.pathsep) if part]
    return [*own, typed_path("~/.config/toolkit/sites"), *map(Path, import_module("toolkit.site_configs").__path__)]


def site_files(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return all site files by name; a user's file takes precedence over a shipped file of the same name."""
    found: dict[str, Path] = {}
    for folder in site_folders(environ):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def partitions_in(name_or_path: str) -> list[str]:
    """Return the partitions that a site file itself lists; [] if it cannot be read, which `load_site` reports."""
    path = site_files(os.environ).get(name_or_path, typed_path(name_or_path))
    try:
        partitions = tomllib.loads(path.read_text(encoding="utf-8")).get("partitions", {})
    except (OSError, ValueError):
        return []
    return list(partitions) if isinstance(partitions, dict) else []


def read_user_defaults(environ: Mapping[str, str]) -> Document | None:
    """Return the user's defaults; None without a file. ToolkitError if the file sets a key that has no default."""
    path = Path(environ.get("HOME", "/nonexistent")) / ".config/toolkit/config.toml"
    if not path.is_file():
        return None
    document = read_document(path)
    for key, _ in leaves(document.values):
        if not {dotted(key), key[0]} & {*_USER_KEYS}:
            message = f"{dotted(key)!r} cannot have a default of the user"
            raise ToolkitError(message, where=document.place(key), fix=f"use {', '.join(_USER_KEYS)}")
    return document
