"""Secrets of a job. Those of [env] are read when ranks start, and are in the ranks' environment only; the URL of
[notify] is read when it is called.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit.errors import OwnFailureError
from toolkit.supervise.commands import run_command
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.requests import StopRequest

COMMAND_S = 30.0
SHORTEST = 6  # letters; a shorter value would hide words that are no secret
HIDDEN = "***"


def read_secrets(job: Mapping[str, Any], environ: Mapping[str, str], request: StopRequest) -> dict[str, str]:
    """The variables that [env] secrets refers to, with their values.

    Raises:
        OwnFailureError: one cannot be read.
    """
    references: Mapping[str, str] = (job.get("env") or {}).get("secrets") or {}
    return {name: _value(name, reference, environ, request) for name, reference in references.items()}


def _value(name: str, reference: str, environ: Mapping[str, str], request: StopRequest) -> str:
    where = f"env.secrets.{name}"
    kind, _, rest = reference.partition(":")
    if kind == "env":
        if name not in environ:
            raise OwnFailureError(
                f"{name} was not set where this was submitted", where=where, fix=f"export {name}, and submit again"
            )
        return environ[name]
    if kind == "file":
        return read_secret_file(rest, where=where)
    done = run_command(shlex.split(rest), environ, timeout_s=COMMAND_S, request=request)
    if done.problem or not done.out.strip():
        raise OwnFailureError(
            f"the secret {name}: {done.problem or f'{rest.split()[0]} printed nothing'}",
            where=where,
            fix="run that command by hand where the job runs",
        )
    return done.out.rstrip("\n")


def read_secret_file(name: str, *, where: str) -> str:
    """The text of a file that its owner, who is us, alone may read; without the last line's end.

    Raises:
        OwnFailureError: it cannot be read, or others may read it.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111  pathlib's own ends with an error where there is no such user
    try:
        with path.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OwnFailureError(
            f"cannot read {path}: {said}", where=where, fix="write the secret into that file"
        ) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OwnFailureError(f"others may read {path}", where=where, fix=f"chmod 600 {shlex.quote(str(path))}")
    if not text:
        raise OwnFailureError(f"{path} is empty", where=where, fix="write the secret into that file")
    return text


def read_url(reference: str, environ: Mapping[str, str]) -> str:
    """The URL that `notify.webhook` refers to, which no message quotes.

    Raises:
        OwnFailureError: it cannot be read, or is none of http or https.
    """
    where = "notify.webhook"
    kind, _, place = reference.partition(":")
    if kind == "env" and not environ.get(place):
        raise OwnFailureError(
            f"{place} was not set where this was submitted", where=where,
            fix=f'export {place}, or write webhook = "file:~/.{place.lower()}"',
        )  # fmt: skip
    url = (read_secret_file(place, where=where) if kind == "file" else environ[place]).strip()
    if not _is_url(url):
        raise OwnFailureError(f"{place} holds no http URL", where=where, fix="write https://... there")
    return url


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and len(text.split()) == 1
    except ValueError:  # a port that is not a number
        return False


def without_secrets(end: AttemptEnd, values: Iterable[str]) -> AttemptEnd:
    """An attempt's end as it may be written down and told: ranks quote what they were given, as in a URL that failed."""
    known = list(values)
    evidence = [(place, hide(line, known)) for place, line in end.evidence]
    lines = [hide(line, known) for line in end.last_lines]
    return replace(end, reason=hide(end.reason, known), last_lines=lines, evidence=evidence)


def hide(text: str, values: Iterable[str]) -> str:
    """A string with `***` for each value of a secret."""
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        if len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    return text
