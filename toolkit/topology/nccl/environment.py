"""What is set, and where: this process's environment, a file, a run's resolved job, or a log."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.topology.nccl.finding import Given

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SYSTEM_FILE = Path("/etc/nccl.conf")
MOST_BYTES = 16 << 20  # an environment is some kilobytes; a file of another kind is soon told


def of_process(environ: Mapping[str, str], system_file: Path = SYSTEM_FILE, home: Path | None = None) -> list[Given]:
    """The environment, then the files that NCCL reads for what the environment leaves open."""
    givens = [Given(name, value, "environment") for name, value in environ.items()]
    named = environ.get("NCCL_CONF_FILE", "")
    own = Path(named) if named else (home or Path.home()) / ".nccl.conf"
    for path in (own, system_file):
        if path.is_file():
            givens += _of_nccl_file(path)
    return givens


def _of_nccl_file(path: Path) -> list[Given]:
    """NCCL's own form: NAME=VALUE to the end of the line, without quotes; # at the beginning is a comment."""
    givens = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            givens.append(Given(name, value, f"{path}:{number}"))
    return givens


def of_file(path: Path) -> list[Given]:
    """`NAME=VALUE` or `export NAME=VALUE` lines: what `env` prints, Docker reads, or a script sets before it does more.

    The last of a name counts.

    Raises:
        ToolkitError: the file cannot be read, or sets nothing.
    """
    text = _text_of(path)
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
        quoted = any(letter in value for letter in "'\"") or " #" in value
        words = [f"{name}={(_words(value) or [''])[0] if quoted else value.strip()}"] if equals else []
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return [(name, value) for name, value in pairs if _NAME.fullmatch(name)]


def _words(text: str) -> list[str]:
    """The words as a shell reads them; a quote that nothing closes is a letter."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def of_job(job: Mapping[str, Any], where: str) -> list[Given]:
    """What a resolved job sets for its ranks: the job's [env] before the site's [network] and [env]."""
    givens = []
    for table in ("env", "network", "site_env"):
        entry = job.get(table)
        values = entry.get("vars") if isinstance(entry, Mapping) else None
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            givens.append(Given(str(name), str(value), f"{where}: {'site env' if table == 'site_env' else table}.vars"))
    return givens


def of_log(environment: Mapping[str, str | None] | None, where: str) -> list[Given]:
    """What NCCL said was set by its environment; a variable with two values is left out."""
    return [Given(name, value, where) for name, value in (environment or {}).items() if value is not None]


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ToolkitError(
            f"cannot be read: {error.strerror}", where=str(path), fix="give a file that you can read"
        ) from error
    if len(data) > MOST_BYTES:
        raise ToolkitError(f"more than {MOST_BYTES >> 20} MiB", where=str(path), fix="give the file with the variables")
    return data.decode("utf-8-sig", errors="replace")
