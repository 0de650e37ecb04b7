"""One process writes in a `checkpoints` folder; a second one is told who the first is.

In a run the claim of an attempt says who writes. Elsewhere the same script may be started twice, and both are attempt 0.
So the one that saves first leaves `.writer` there, which says who it is, and takes it away when it ends. Reading needs no
such file and makes none.
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
from toolkit.rundir.files import mode_of_files_in, utc_now
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.allocation import process_start_ticks

WRITER = ".writer"
_SIGNING_S = 1.0  # between the making of the file and its one write; a kill, or a power cut, may leave it without
_TRIES = 50  # each of them lost to another process


@dataclass(frozen=True)
class Writer:
    """Who writes. `process_started` is the kernel's start time of `pid`, in clock ticks since boot."""

    host: str
    pid: int
    process_started: int
    attempt: int
    since: str

    @classmethod
    def here(cls, attempt: int) -> Writer:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), process_start_ticks(os.getpid()), attempt, utc_now())

    def is_same_process(self, other: Writer) -> bool:
        return (self.host, self.pid, self.process_started) == (other.host, other.pid, other.process_started)


_NOBODY = Writer("", 0, 0, -1, "")


def is_of_a_run(directory: Path) -> bool:
    """True for a run's `checkpoints` folder. Other folders have no attempts, and their modes are the umask's."""
    return RunDirectory(directory.parent).attempts.is_dir()


def given_up(place: Path, attempt: int, newest: int) -> OwnFailureError:
    """What an attempt hears that is not the newest any more."""
    return OwnFailureError(f"attempt {attempt} was given up on: attempt {newest} has the run now", where=str(place))


def refuse_others(directory: Path, attempt: int) -> Writer | None:
    """Whoever may not write in a `checkpoints` folder is told who does.

    A run's checkpoints belong to its newest attempt: ranks that live on after it was given up on write none. Elsewhere
    they belong to the process that saved first, until it ends.

    Returns:
        The writer that the folder names: this process, or one whose place it may take; None where it names none.

    Raises:
        OwnFailureError: a later attempt of the run has begun.
        ToolkitError: another process writes there, or may do so: on another host nobody here can look for it.
    """
    newest = max(RunDirectory(directory.parent).attempt_numbers(), default=attempt)
    if newest > attempt:
        raise given_up(directory, attempt, newest)
    owner, me = _read(directory / WRITER), Writer.here(attempt)
    if owner is None or owner == _NOBODY or owner.is_same_process(me):
        return owner
    if is_of_a_run(directory):
        if owner.attempt > attempt:  # a listing of attempts may be old (NFS)
            raise given_up(directory, attempt, owner.attempt)
        if owner.attempt < attempt:
            return owner
    if owner.host == me.host and not _lives(owner):
        return owner
    raise _is_taken(directory, owner, me)


def _is_taken(directory: Path, owner: Writer, me: Writer) -> ToolkitError:
    fix = "wait for its end, or give this one another folder"
    if owner.host == me.host:
        fix += f"; `kill {owner.pid}` ends it"
    else:
        fix += f"; if it is gone, remove {directory / WRITER}"
    return ToolkitError(
        f"process {owner.pid} on {owner.host} (attempt {owner.attempt}) has saved here since {owner.since}, and this is "
        f"process {me.pid} on {me.host} (attempt {me.attempt}): one of them may write",
        where=str(directory),
        fix=fix,
    )


def hold_folder(directory: Path, attempt: int) -> None:
    """Be the one who writes in a `checkpoints` folder from now on, until this process ends.

    Raises:
        OwnFailureError, ToolkitError: as `refuse_others`.
        OSError: the folder cannot be read, or not be written.
    """
    path, me = directory / WRITER, Writer.here(attempt)
    for _ in range(_TRIES):
        owner = refuse_others(directory, attempt)
        if owner is None:
            _make(path, me)
            _give_back_at_the_end(path)
        elif owner.is_same_process(me) and owner.attempt == attempt:
            return
        else:
            _put_away(path, owner)
    raise OwnFailureError("too many processes want to write here", where=str(directory), fix="start one of them")


def _make(path: Path, me: Writer) -> None:
    """Only one process makes the file. Who is slow to sign it finds another's name in it at the next look."""
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


def _put_away(path: Path, owner: Writer) -> None:
    """Remove the file of a writer that is gone, and no other's that may have come meanwhile."""
    away = path.with_name(f"{WRITER}-{os.getpid()}")
    with suppress(FileNotFoundError):  # another process has put it away
        path.rename(away)
        try:
            if _read(away) == owner:
                away.unlink()
        finally:
            if away.exists():
                away.rename(path)


def _read(path: Path) -> Writer | None:
    """Who the file names; `_NOBODY` where it stays unsigned, or is damaged."""
    deadline = time.monotonic() + _SIGNING_S
    while True:
        try:
            return Writer(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            if time.monotonic() > deadline:
                return _NOBODY
            time.sleep(_SIGNING_S / 20)


def _lives(owner: Writer) -> bool:
    """Whether a process of this host goes on."""
    try:
        return process_start_ticks(owner.pid) == owner.process_started
    except ProcessLookupError:
        return False


@cache
def _give_back_at_the_end(path: Path) -> None:
    atexit.register(_give_back, path)


def _give_back(path: Path) -> None:
    """At the end of this process, or of a fork of it, whose the file is not."""
    with suppress(OSError):  # the next one finds that this process has ended
        owner = _read(path)
        if owner is not None and owner.is_same_process(Writer.here(0)):
            path.unlink()
