"""Read variable settings from the environment of this process, a file, the resolved job of a run, or a log."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.topology.nccl.finding import Given

__all__ = ["SYSTEM_FILE", "of_process"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SYSTEM_FILE = Path("/etc/nccl.conf")
MOST_BYTES = 16 << 20  # an environment has a few kilobytes; a file larger than this is not one


def of_process(environ: Mapping[str, str], system_file: Path = SYSTEM_FILE, home: Path | None = None) -> list[Given]:
    """Return the settings of the environment, then those of the files that NCCL reads for unset variables."""
    givens = [Given(name, value, "environment") for name, value in environ.items()]
    named = environ.get("NCCL_CONF_FILE", "")
    for path in (Path(named) if named else (home or Path.home()) / ".nccl.conf", system_file):
        if path.is_file():
            givens += _of_nccl_file(path)
    return givens


def _of_nccl_file(path: Path) -> list[Given]:
    """Read an nccl.conf: NAME=VALUE to the end of the line, without quotes; lines that start with # are comments."""
    givens = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            givens.append(Given(name, value, f"{path}:{number}"))
    return givens


def of_file(path: Path) -> list[Given]:
    """Return the last setting of each variable in a script, or in the output of `env` or `env -0`.

    Raises:
        ToolkitError: the file is not readable, or does not set a variable.
    """
    text = _read(path)
    lines = text.split("\0") if "\0" in text else text.splitlines()  # the output of env -0
    givens: dict[str, Given] = {}
    for number, line in enumerate(lines, 1):
        for name, value in _assignments(line.strip()):
            givens[name] = Given(name, value, f"{path}:{number}")
    if not givens and text.strip():
        raise ToolkitError("expected NAME=VALUE lines, got none", where=str(path), fix="write one NAME=VALUE per line")
    return list(givens.values())


def _assignments(line: str) -> list[tuple[str, str]]:
    if line.startswith("export "):
        words = _words(line.removeprefix("export "))
    else:
        name, equals, value = line.partition("=")
        is_quoted = any(quote in value for quote in "'\"") or " #" in value
        words = [f"{name}={(_words(value) or [''])[0] if is_quoted else value.strip()}"] if equals else []
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return [(name, value) for name, value in pairs if _NAME.fullmatch(name)]


def _words(text: str) -> list[str]:
    """Split `text` as a shell does; with an unclosed quote, split it at whitespace."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def of_job(job: Mapping[str, Any], where: str) -> list[Given]:
    """Return the settings of a resolved job for its ranks: those of the job, then the site's [network] and [env]."""
    givens = []
    for table, label in (("env", "env"), ("network", "network"), ("site_env", "site env")):
        entry = job.get(table)
        values = entry.get("vars") if isinstance(entry, Mapping) else None
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            givens.append(Given(str(name), str(value), f"{where}: {label}.vars"))
    return givens


def of_log(environment: Mapping[str, str | None] | None, where: str) -> list[Given]:
    """Return the settings that NCCL logged, without variables that it logged with different values (None)."""
    return [Given(name, value, where) for name, value in (environment or {}).items() if value is not None]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ToolkitError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="pass a readable file"
        ) from error
    if len(data) > MOST_BYTES:
        fix = "pass the file with the variables"
        raise ToolkitError(f"expected at most {MOST_BYTES >> 20} MiB, got a larger file", where=str(path), fix=fix)
    return data.decode("utf-8-sig", errors="replace")
