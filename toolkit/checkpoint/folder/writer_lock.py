"""Allows one process to write in a `checkpoints` folder; a second one gets an error that names the first.

In a run directory only the newest attempt may write. Elsewhere a user may start the same script twice, both as
attempt 0, so the process that saves first writes its identity to `.writer`, and removes the file at exit.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.claims import process_start_ticks
from toolkit.rundir.files import mode_of_files_in, utc_now
from toolkit.rundir.layout import RunDirectory

WRITER = ".writer"
_SIGNING_S = 1.0  # the longest time between creating and writing the file; a killed process may leave it empty
_TRIES = 50  # how often to try to create the file if another process creates it first


@dataclass(frozen=True)
class Writer:
    """The process that may write. `process_started` is the start time of `pid`, in clock ticks since boot."""

    host: str
    pid: int
    process_started: int
    attempt: int
    since: str

    @classmethod
    def here(cls, attempt: int) -> Writer:
        """Return the `Writer` for this process."""
        return cls(socket.gethostname(), os.getpid(), process_start_ticks(os.getpid()), attempt, utc_now())

    def is_same_process(self, other: Writer) -> bool:
        return (self.host, self.pid, self.process_started) == (other.host, other.pid, other.process_started)


_UNKNOWN = Writer("", 0, 0, -1, "")


def is_of_a_run(directory: Path) -> bool:
    """Return whether a folder is the `checkpoints` of a run. Others have no attempts; the umask sets their modes."""
    return RunDirectory(directory.parent).attempts.is_dir()


def given_up(folder: Path, attempt: int, newest: int) -> OwnFailureError:
    """Return the error for an attempt that is no longer the newest."""
    return OwnFailureError(f"attempt {attempt} was abandoned: attempt {newest} owns the run now", where=str(folder))


def refuse_others(directory: Path, attempt: int) -> Writer | None:
    """Raise an error if another process may write in a `checkpoints` folder.

    In a run the newest attempt owns the folder, elsewhere the process that saved first, until it exits. Returns the
    recorded writer, which is this process or one that it may replace; None if no writer is recorded.

    Raises:
        OwnFailureError: a later attempt of the run has started.
        ToolkitError: another process writes there, or may still run on another host, where this process cannot check.
    """
    newest = max(RunDirectory(directory.parent).attempt_numbers(), default=attempt)
    if newest > attempt:
        raise given_up(directory, attempt, newest)
    owner, me = _read(directory / WRITER), Writer.here(attempt)
    if owner is None or owner == _UNKNOWN or owner.is_same_process(me):
        return owner
    if is_of_a_run(directory):
        if owner.attempt > attempt:  # NFS may not list the later attempt yet
            raise given_up(directory, attempt, owner.attempt)
        if owner.attempt < attempt:
            return owner
    if owner.host == me.host and not _is_running(owner):
        return owner
    raise _is_taken(directory, owner, me)


def _is_taken(directory: Path, owner: Writer, me: Writer) -> ToolkitError:
    fix = "wait until that process exits, or choose another folder for this one"
    if owner.host == me.host:
        fix += f"; `kill {owner.pid}` stops it"
    else:
        fix += f"; if that process no longer runs, remove {directory / WRITER}"
    return ToolkitError(
        f"process {owner.pid} on {owner.host} (attempt {owner.attempt}) has saved here since {owner.since}, and this is "
        f"process {me.pid} on {me.host} (attempt {me.attempt}): only one of them may write",
        where=str(directory),
        fix=fix,
    )


def hold_folder(directory: Path, attempt: int) -> None:
    """Make this process the only writer of a folder until it exits; errors as in `refuse_others`, or OSError."""
    path, me = directory / WRITER, Writer.here(attempt)
    for _ in range(_TRIES):
        owner = refuse_others(directory, attempt)
        if owner is None:
            _make(path, me)
            _release_at_exit(path)
        elif owner.is_same_process(me) and owner.attempt == attempt:
            return
        else:
            _remove_stale(path, owner)
    raise OwnFailureError("too many processes try to write here", where=str(directory), fix="start only one process")


def _make(path: Path, me: Writer) -> None:
    """Create the file with this writer, unless another process has just created it, which the next try then reads."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, mode_of_files_in(path.parent))  # the umask must not decide who can read
        os.write(descriptor, (json.dumps(asdict(me)) + "\n").encode())
    except OSError as error:
        path.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _remove_stale(path: Path, owner: Writer) -> None:
    """Remove the file of a writer that exited, unless a new writer has replaced it."""
    away = path.with_name(f"{WRITER}-{os.getpid()}")
    with suppress(FileNotFoundError):  # another process has removed the file
        path.rename(away)
        try:
            if _read(away) == owner:
                away.unlink()
        finally:
            if away.exists():
                away.rename(path)


def _read(path: Path) -> Writer | None:
    """Return the writer that the file names, None without a file, or `_UNKNOWN` if it stays empty or is damaged."""
    deadline = time.monotonic() + _SIGNING_S
    while True:
        try:
            return Writer(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            if time.monotonic() > deadline:
                return _UNKNOWN
            time.sleep(_SIGNING_S / 20)


def _is_running(owner: Writer) -> bool:
    """Return whether a process of this host is still running; a reused pid does not count."""
    try:
        return process_start_ticks(owner.pid) == owner.process_started
    except ProcessLookupError:
        return False


@cache
def _release_at_exit(path: Path) -> None:
    atexit.register(_release, path)


def _release(path: Path) -> None:
    """Remove the file of this process at exit, but not in a fork, which does not own it."""
    with suppress(OSError):  # a file that remains does no harm: the next process sees that this one has exited
        owner = _read(path)
        if owner is not None and owner.is_same_process(Writer.here(0)):
            path.unlink()
