"""Settings and their source: the environment of this process, a file, a run's resolved job, or a log."""

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
MOST_BYTES = 16 << 20  # an environment has some kilobytes; a larger file is a mistake


def of_process(environ: Mapping[str, str], system_file: Path = SYSTEM_FILE, home: Path | None = None) -> list[Given]:
    """The environment, followed by the files that NCCL reads for unset variables."""
    givens = [Given(name, value, "environment") for name, value in environ.items()]
    named = environ.get("NCCL_CONF_FILE", "")
    for path in (Path(named) if named else (home or Path.home()) / ".nccl.conf", system_file):
        if path.is_file():
            givens += _of_nccl_file(path)
    return givens


def _of_nccl_file(path: Path) -> list[Given]:
    """NCCL's own format: NAME=VALUE up to the end of the line, without quotes; a line that starts with # is a comment."""
    givens = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            givens.append(Given(name, value, f"{path}:{number}"))
    return givens


def of_file(path: Path) -> list[Given]:
    """The last setting of each name in `NAME=VALUE` or `export NAME=VALUE` lines: a script, or the output of `env`.

    Raises:
        ToolkitError: the file is not readable, or sets no variable.
    """
    text = _read(path)
    lines = text.split("\0") if "\0" in text else text.splitlines()  # env -0
    givens: dict[str, Given] = {}
    for number, line in enumerate(lines, 1):
        for name, value in _assignments(line.strip()):
            givens[name] = Given(name, value, f"{path}:{number}")
    if not givens and text.strip():
        raise ToolkitError("no line sets a variable", where=str(path), fix="write NAME=VALUE on a line")
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
    """The words as a shell splits them; an unclosed quote is an ordinary character."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def of_job(job: Mapping[str, Any], where: str) -> list[Given]:
    """The settings of a resolved job for its ranks: the job's [env] before the site's [network] and [env]."""
    givens = []
    for table, label in (("env", "env"), ("network", "network"), ("site_env", "site env")):
        entry = job.get(table)
        values = entry.get("vars") if isinstance(entry, Mapping) else None
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            givens.append(Given(str(name), str(value), f"{where}: {label}.vars"))
    return givens


def of_log(environment: Mapping[str, str | None] | None, where: str) -> list[Given]:
    """The settings that NCCL logged, without variables that it logged with two values."""
    return [Given(name, value, where) for name, value in (environment or {}).items() if value is not None]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ToolkitError(
            f"cannot be read: {error.strerror}", where=str(path), fix="pass a file that you can read"
        ) from error
    if len(data) > MOST_BYTES:
        fix = "pass the file with the variables"
        raise ToolkitError(f"expected at most {MOST_BYTES >> 20} MiB, got more", where=str(path), fix=fix)
    return data.decode("utf-8-sig", errors="replace")
