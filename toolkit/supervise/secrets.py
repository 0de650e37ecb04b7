"""Read the secrets of a job, and redact them in messages. Those in [env] are read when ranks start, and exist only in
the environment of ranks and of the processes of `observe.trackers`. The URL in [notify] is read before each request to it.
"""

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

__all__ = ["hide", "read_reference", "read_secret_file", "read_url"]

COMMAND_S = 30.0
SHORTEST = 6  # characters; hiding a shorter value would also hide other text
HIDDEN = "***"


def read_secrets(job: Mapping[str, Any], environ: Mapping[str, str], request: StopRequest) -> dict[str, str]:
    """Return the values of the variables in [env] secrets, by name.

    Raises:
        OwnFailureError: a secret cannot be read.
    """
    references: Mapping[str, str] = (job.get("env") or {}).get("secrets") or {}
    return {name: _value(name, reference, environ, request) for name, reference in references.items()}


def _value(name: str, reference: str, environ: Mapping[str, str], request: StopRequest) -> str:
    where = f"env.secrets.{name}"
    kind, _, rest = reference.partition(":")
    if kind == "env":
        if name not in environ:
            raise OwnFailureError(
                f"{name} was not set when this job was submitted", where=where, fix=f"export {name}, and submit again"
            )
        return environ[name]
    if kind == "file":
        return read_secret_file(rest, where=where)
    done = run_command(shlex.split(rest), environ, timeout_s=COMMAND_S, request=request)
    if done.problem or not done.out.strip():
        raise OwnFailureError(
            f"cannot read the secret {name}: {done.problem or f'{rest.split()[0]} printed nothing'}",
            where=where,
            fix="test this command on the host where the job runs",
        )
    return done.out.rstrip("\n")


def read_secret_file(name: str, *, where: str) -> str:
    """Return the contents of a file that only its owner, the current user, may read, without the final newline.

    Raises:
        OwnFailureError: the file cannot be read, or other users may read it.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111  pathlib's version raises an error for an unknown user
    try:
        with path.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "not UTF-8"
        raise OwnFailureError(
            f"cannot read {path}: {problem}", where=where, fix="write the secret into this file"
        ) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise OwnFailureError(f"other users may read {path}", where=where, fix=f"chmod 600 {shlex.quote(str(path))}")
    if not text:
        raise OwnFailureError(f"{path} is empty", where=where, fix="write the secret into this file")
    return text


def read_reference(reference: str, environ: Mapping[str, str], where: str) -> str:
    """Return the secret that a key of [notify] refers to, or its value if that is not a reference.

    Raises:
        OwnFailureError: the reference cannot be read.
    """
    kind, _, source = reference.partition(":")
    if kind == "env" and not environ.get(source):
        key = where.rpartition(".")[2]
        raise OwnFailureError(
            f"{source} was not set when this job was submitted", where=where,
            fix=f'export {source}, or set {key} = "file:~/.{source.lower()}"',
        )  # fmt: skip
    if kind == "file":
        return read_secret_file(source, where=where).strip()
    return environ[source].strip() if kind == "env" else reference


def read_url(reference: str, environ: Mapping[str, str], where: str = "notify.webhook") -> str:
    """Return the URL that a key of [notify] refers to; error messages never contain it.

    Raises:
        OwnFailureError: the reference cannot be read, or is not an http or https URL.
    """
    url = read_reference(reference, environ, where)
    if not _is_url(url):
        source = reference.partition(":")[2]
        raise OwnFailureError(
            f"expected an http or https URL in {source}", where=where, fix="use a URL that starts with https://"
        )
    return url


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and len(text.split()) == 1
    except ValueError:  # the port is invalid
        return False


def without_secrets(end: AttemptEnd, values: Iterable[str]) -> AttemptEnd:
    """Remove secrets from an attempt's end before it is recorded: error messages may quote values, such as a URL."""
    secrets = list(values)
    evidence = [(file, hide(line, secrets)) for file, line in end.evidence]
    lines = [hide(line, secrets) for line in end.last_lines]
    return replace(end, reason=hide(end.reason, secrets), last_lines=lines, evidence=evidence)


def hide(text: str, values: Iterable[str]) -> str:
    """Replace each secret value in a string by `***`."""
    for value in sorted(values, key=len, reverse=True):  # the longest first, as one may contain another
        if len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    return text
