"""The small parent of each rank: it opens the log, waits, and tells how the rank ended even after a `kill -9`.

The rank itself is a fork of it, made before anything heavy is imported. Launchers report a dead rank each in
their own way, and some not at all; this is the same under all of them. Standard library only.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from toolkit.errors import ToolkitError
from toolkit.rank.log import RankLog
from toolkit.rundir.files import is_unwritable, utc_now, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.parent_death import signal_on_parent_death
from toolkit.supervise.shared_memory import remove_left_behind
from toolkit.supervise.usage import usage_of_node
from toolkit.terminal.talk import say_beside

STACKS_PATIENCE_S = 2.0
FILE_SYSTEM_PATIENCE_S = 600.0  # as the supervisor's: only this process knows that the rank is done
ROOM_PATIENCE_S = 60.0  # with a full disk: the user may be freeing space
ERROR_PATIENCE_S = 5.0
WRITE_PERIOD_S = 1.0
_PASSED_ON = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_RANK_VARIABLES = {
    "srun": ("SLURM_PROCID",),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "local": ("RANK",),
}


def rank_by_launcher(environ: Mapping[str, str]) -> int:
    """This process's rank as the launcher's environment gives it, without asking MPI."""
    launcher = environ.get("TOOLKIT_LAUNCHER", "")
    for name in _RANK_VARIABLES.get(launcher, ()):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    raise ToolkitError(
        f"the launcher {launcher or '(none)'} gave no rank number ({' or '.join(_RANK_VARIABLES.get(launcher, ('nothing known',)))})",
        where=socket.gethostname(),
        fix="set launcher.kind and launcher.mpi of the site to what the MPI here understands",
    )


def guard(attempt: AttemptDirectory, rank: int, body: Callable[[], int], *, foreign: bool = False) -> int:
    """Run `body` as rank `rank` in a child process and record its end; returns the code for the launcher.

    `body` returns the rank's exit code. A rank that saved and left on request has written its own done marker,
    with "stopped" in it; no exit code could say so, since a user's program may end with any. Of a `foreign` program
    the guard says it, by whether it was told to end before it did.
    """
    host = socket.gethostname()
    log = RankLog(attempt, rank, host)
    os.environ["TOOLKIT_RANK"] = str(rank)  # for programs that know no launcher's variables
    write_json(
        attempt.rank_file(rank), {"rank": rank, "host": host, "pid": os.getpid(), "time": utc_now()}, durable=False
    )
    remove_left_behind(_start_began(os.environ))  # by an earlier attempt's ranks on this node
    guard_process, launcher = os.getpid(), os.getppid()
    # Memory that has no name: a rank that never stalls makes no file.
    stacks = os.memfd_create("stacks")
    child = os.fork()
    if child == 0:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if foreign:  # where a launcher signals all processes: it must not die of what only its guard understands
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal_on_parent_death(signal.SIGKILL)  # a rank must not outlive its guard
        if os.getppid() != guard_process:  # it was gone before the kernel knew our wish
            os._exit(1)
        return body()
    log.begin()
    heard = _pass_signals_to(child, foreign=foreign)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: _keep_stacks(child, stacks, attempt.stack_file(rank)))
    _end_with(launcher, child)
    usage = usage_of_node(attempt, rank, os.environ)
    if usage is not None:
        usage.start()
    _, status = os.waitpid(child, 0)
    for number in (*_PASSED_ON, signal.SIGUSR1):  # from here on the child's number may be another process's
        signal.signal(number, signal.SIG_IGN)
    log.end()
    code = os.waitstatus_to_exitcode(status)
    _tell_end(attempt, rank, code, "stopped\n" if foreign and heard else "done\n")
    if usage is not None:  # behind that: who waits for the rank need not wait for this
        usage.finish()
    return 128 - code if code < 0 else code


def _start_began(environ: Mapping[str, str]) -> float:
    """When this life of the allocation began, in seconds since the epoch; infinite for ranks of no supervisor."""
    with suppress(KeyError, OSError):
        return Path(environ["TOOLKIT_RESOLVED_JOB"]).stat().st_mtime
    return math.inf


def _tell_end(attempt: AttemptDirectory, rank: int, code: int, word: str) -> None:
    """Leave the done marker with `word`, or the error of a rank that left none itself."""
    if code == 0:
        marker = attempt.done_marker(rank)
        _write_if_missing(marker, lambda: _mark_done(marker, word), patience_s=FILE_SYSTEM_PATIENCE_S)
        return
    error_file = attempt.error_file(rank)
    error = _silent_error(rank, socket.gethostname(), code)
    # Not for long: where it cannot be written, the launcher's word of our own end is what the supervisor hears.
    _write_if_missing(error_file, lambda: write_json(error_file, error), patience_s=ERROR_PATIENCE_S)


def _mark_done(marker: Path, word: str) -> None:
    """Leave the done marker. An empty one says done, too: a full disk mostly has room for a name."""
    try:
        write_text(marker, word)
    except OSError as error:
        if not is_unwritable(error) or word != "done\n":
            raise
        marker.touch()


def _write_if_missing(path: Path, write: Callable[[], None], *, patience_s: float) -> None:
    """Write how the rank ended, unless it did so itself; a pause of the file system is waited out, a full disk briefly."""
    began = time.monotonic()
    is_told = False
    while True:
        try:
            if not path.exists():
                write()
            return
        except OSError as error:
            if is_unwritable(error):
                patience_s = min(patience_s, ROOM_PATIENCE_S)
            if not is_told:
                is_told = True
                say_beside(f"cannot write {path}: {error.strerror}; retrying for {patience_s:.0f} s")
            if time.monotonic() - began > patience_s:
                say_beside(f"given up: {path} is not written")
                return
        time.sleep(WRITE_PERIOD_S)


def _pass_signals_to(child: int, *, foreign: bool) -> list[int]:
    """From now on the rank gets what this process gets; the list that is returned grows by each."""
    heard: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        is_told = bool(heard)
        heard.append(number)
        if foreign and number == signal.SIGUSR2:  # all that srun passes on, and nothing to a program
            if is_told:  # by Slurm itself, say: a second TERM may mean that it need not save
                return
            number = signal.SIGTERM
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, forward)
    return heard


def _keep_stacks(child: int, stacks: int, path: Path) -> None:
    """Have the rank write where its threads are, and keep that; one that is stopped or hangs in the kernel cannot."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_PATIENCE_S
    written = 0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, written = written, os.fstat(stacks).st_size
        if 0 < written == before:  # it has come to an end
            break
    text = os.pread(stacks, written, 0).decode(errors="replace")
    write_text(path, text or f"no answer: process {child} is in state {_process_state(child)}\n")


def _process_state(pid: int) -> str:
    """The kernel's word for it, such as `T (stopped)` or `D (disk sleep)`; proc(5)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "gone"
    return next(line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:"))


def _end_with(launcher: int, child: int) -> None:
    """Kill the rank, and what it started, when the process that launched us dies, even by `kill -9`."""

    def end_group(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() == launcher:  # a terminal's hang-up, or a mere thread of the launcher has ended
            return
        if os.getpgrp() == os.getpid():  # the group is ours: launchers start each rank in one of its own
            os.killpg(0, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGHUP, end_group)
    signal_on_parent_death(signal.SIGHUP)
    end_group(signal.SIGHUP, None)  # it may have died before the kernel knew our wish


def _silent_error(rank: int, host: str, code: int) -> dict[str, object]:
    """The error of a rank that could not write its own."""
    if code < 0:
        name = signal.Signals(-code).name
        reason = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return _error(rank, host, "signal", reason, 128 - code)
    return _error(rank, host, "exit", f"exit code {code}", code)


def _error(rank: int, host: str, kind: str, reason: str, exit_code: int) -> dict[str, object]:
    return {
        "rank": rank, "host": host, "kind": kind, "reason": reason, "exit_code": exit_code, "time": utc_now(),
    }  # fmt: skip
