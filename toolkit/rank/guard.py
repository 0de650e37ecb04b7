"""The guard: the parent process of each rank, which opens its log and records how it exited, even after a `kill -9`.

The rank is a fork of the guard, created before any heavy import. Launchers report a killed rank differently or not at
all; the record of the guard is the same under all launchers. Standard library only.
"""

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
from toolkit.metrics.ring import rings_of
from toolkit.rank.flight_recorder import FLIGHT_SIGNAL
from toolkit.rank.log import RankLog, ScriptLog, default_log
from toolkit.rank.step_lines import StepLines
from toolkit.rundir.files import is_unwritable, utc_now, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.collecting import collection_of_node
from toolkit.supervise.parent_death import adopt_orphans, signal_on_parent_death
from toolkit.supervise.proc import status_of
from toolkit.supervise.process_tree import GRACE_S, ProcessTree, end_descendants, handles
from toolkit.supervise.shared_memory import remove_left_behind
from toolkit.terminal.talk import say_beside

STACKS_PATIENCE_S = 2.0
FILE_SYSTEM_PATIENCE_S = 600.0  # as in the supervisor; long, since only this process knows that the rank is done
ROOM_PATIENCE_S = 60.0  # on a full disk, so that the user can free space
ERROR_PATIENCE_S = 5.0
WRITE_PERIOD_S = 1.0
# A real-time signal, which programs do not use: frameworks such as Lightning have handlers for SIGUSR1.
STACK_SIGNAL = signal.SIGRTMIN + 7
_PASSED_ON = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_RANK_VARIABLES = {
    "srun": ("SLURM_PROCID",),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "local": ("RANK",),
    "script": ("TOOLKIT_RANK",),
}


def rank_by_launcher(environ: Mapping[str, str]) -> int:
    """Return the rank of this process from the environment of the launcher, without calling MPI."""
    launcher = environ.get("TOOLKIT_LAUNCHER", "")
    for name in _RANK_VARIABLES.get(launcher, ()):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    raise ToolkitError(
        f"the launcher {launcher or '(none)'} set no rank number (in {' or '.join(_RANK_VARIABLES.get(launcher, ('no known variable',)))})",
        where=socket.gethostname(),
        fix="set launcher.kind and launcher.mpi of the site to values that the MPI here supports",
    )


def _launcher_of_node() -> int:
    """Return the pid of the process that started the ranks of this node.

    It is the parent of the guard, or the parent's parent if that is the runtime of the rank's container.
    """
    pid = os.getppid()
    with suppress(OSError):  # it has exited
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"Apptainer runtime", b"Singularity runtime")):
            pid = int(status_of(pid).get("PPid", pid))
    return pid


def guard(attempt: AttemptDirectory, rank: int, body: Callable[[], int], *, foreign: bool = False) -> int:
    """Run `body` as rank `rank` in a child process and record its end; return the exit code for the launcher.

    `body` returns the exit code of the rank. A rank that saved and exited on request writes "stopped" to its done marker
    itself, because user code may exit with any code. For a `foreign` program, one that does not use toolkit, the guard
    writes "stopped" if the program received a stop signal before it exited.
    """
    host = socket.gethostname()
    is_script = os.environ.get("TOOLKIT_LAUNCHER") == "script"
    outputs = tuple(map(int, os.environ.get("TOOLKIT_OUTPUTS", "").split()))
    default = os.environ.get("TOOLKIT_DEFAULT_LOG", "")
    log = ScriptLog(attempt, outputs) if outputs else default_log(attempt, default) or RankLog(attempt, rank, host)
    os.environ["TOOLKIT_RANK"] = str(rank)  # for programs that do not read launcher variables
    launcher_of_node = _launcher_of_node()
    os.environ["TOOLKIT_LAUNCHER_PID"] = str(launcher_of_node)
    write_json(
        attempt.rank_file(rank), {"rank": rank, "host": host, "pid": os.getpid(), "time": utc_now()}, durable=False
    )
    remove_left_behind(_start_began(os.environ))  # remove shared memory that ranks of an earlier attempt left here
    guard_process, launcher = os.getpid(), os.getppid()
    adopt_orphans()
    # Use anonymous memory, so that only ranks that stall create a file.
    stacks = os.memfd_create("stacks")
    child = os.fork()
    if child == 0:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        # A launcher may signal all processes of a rank, but this signal is only for the guard. A shell cannot trap a signal
        # that is ignored when it starts.
        if not is_script:
            signal.signal(signal.SIGUSR2 if foreign else signal.SIGUSR1, signal.SIG_IGN)
        signal_on_parent_death(signal.SIGKILL)  # a rank must not outlive its guard
        if os.getppid() != guard_process:  # the guard had exited before prctl took effect
            os._exit(1)
        return body()
    steps = StepLines(attempt, log.path, launcher_of_node) if foreign and rank == 0 else None
    if steps is not None:
        steps.start()
    log.begin()
    forward = _Forward(child)
    received = forward.received
    if is_script:
        for number in (*_PASSED_ON, signal.SIGUSR1):
            signal.signal(number, forward.to_script)
    elif foreign:
        for number in _PASSED_ON:
            signal.signal(number, forward.to_program)
    else:
        for number in _PASSED_ON:
            signal.signal(number, forward.to_rank)
    if not is_script:
        signal.signal(signal.SIGUSR1, lambda _number, _frame: _keep_stacks(child, stacks, attempt.stack_file(rank)))
    _end_with(launcher, child)
    collection = collection_of_node(attempt, rank, launcher_of_node, os.environ)
    if collection is not None:
        collection.start()
    # The rank remains a zombie for now, so that the kernel does not reuse its PID.
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)  # an orphan, or the reader of steps
        if steps is not None:
            steps.note_end(ended.si_pid, ended.si_status)
    if foreign and received:  # a shell exits at once, while the programs that it has started still save
        forward.tree.await_exit()
    _, status = os.waitpid(child, 0)
    for number in (*_PASSED_ON, signal.SIGUSR1):  # from here on the kernel may reuse the child's PID
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:  # before its peers fail, too, and one of them is blamed
        _record_error(attempt, rank, code)
    end_descendants(os.getpid(), grace_s=GRACE_S)
    log.end()
    if steps is not None:
        steps.finish()
    if code == 0:
        marker, state = attempt.done_marker(rank), "stopped\n" if foreign and received else "done\n"
        _write_if_missing(marker, lambda: _mark_done(marker, state), patience_s=FILE_SYSTEM_PATIENCE_S)
    if collection is not None:  # after the end is recorded, so that it does not delay readers of the record
        collection.finish()
    for ring in rings_of(attempt.run.run_id, attempt.number, rank):  # a reader that has opened it can read on
        with suppress(OSError):  # not a ring of this user
            ring.unlink()
    if foreign and received and not is_script:  # mpirun would kill the other ranks, which may still be saving
        return 0
    return 128 - code if code < 0 else code


def _start_began(environ: Mapping[str, str]) -> float:
    """Return when this start of the job began, in seconds since the epoch; infinity for ranks without a supervisor."""
    with suppress(KeyError, OSError):
        return Path(environ["TOOLKIT_RESOLVED_JOB"]).stat().st_mtime
    return math.inf


def _record_error(attempt: AttemptDirectory, rank: int, code: int) -> None:
    """Write an error record if the rank failed without writing one."""
    error_file = attempt.error_file(rank)
    error = _silent_error(rank, code)
    # A short timeout: without the file, the supervisor receives the exit code from the launcher.
    _write_if_missing(error_file, lambda: write_json(error_file, error), patience_s=ERROR_PATIENCE_S)


def _mark_done(marker: Path, word: str) -> None:
    """Write the done marker. An empty marker also means done, since an empty file is usually possible on a full disk."""
    try:
        write_text(marker, word)
    except OSError as error:
        if not is_unwritable(error) or word != "done\n":
            raise
        marker.touch()


def _write_if_missing(path: Path, write: Callable[[], None], *, patience_s: float) -> None:
    """Write the record if the rank did not; retry for `patience_s`, on a full disk for at most `ROOM_PATIENCE_S`."""
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
                say_beside(f"giving up: cannot write {path}")
                return
        time.sleep(WRITE_PERIOD_S)


class _Forward:
    """The signal handlers of a guard. `received` contains the stop signals that it received."""

    def __init__(self, child: int) -> None:
        self.received: list[int] = []
        self.tree = ProcessTree(child)
        self._child = child
        self._sent: list[int] = []

    def to_rank(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to a rank with toolkit's handlers."""
        self.received.append(number)
        self._send(number)

    def to_program(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to a program. SIGUSR2, which srun forwards, requests that the program stops.

        A program receives `job.signal` first if it handles it, and SIGTERM once: it may treat a second one as a request to
        exit without saving.
        """
        if number != signal.SIGUSR2:
            if number == signal.SIGTERM:
                self.tree.note_sent()
            self.to_rank(number, _frame)
            return
        self.received.append(number)
        own = _own_signal()
        if own and not {own, signal.SIGTERM} & {*self._sent} and not self.tree.sent:
            if handles(self._child, own):
                self._send(own)
                return
            say_beside(f"the program does not handle {signal.Signals(own).name}, so it receives SIGTERM")
        if signal.SIGTERM not in self._sent:
            self.tree.terminate()

    def to_script(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to a batch script, as Slurm does: USR1, and USR2 as its own signal, reach the shell alone.

        INT requests that the script stops: the steps or the shell, if it handles that, receive their own signal, and at the
        next INT the script and its programs TERM. Slurm sends TERM to all of them itself when it ends the job.
        """
        if number == signal.SIGUSR1:
            self._send(number)
            return
        own = _own_signal()
        if number == signal.SIGUSR2:
            self._send(own or signal.SIGTERM)
            return
        self.received.append(number)
        of_steps = int(os.environ.get("TOOLKIT_STEP_SIGNAL") or 0)
        if number == signal.SIGTERM:
            self.tree.note_sent()
        elif of_steps and of_steps not in self._sent:
            self._sent.append(of_steps)
            self.tree.signal_steps(of_steps)
        elif own and own not in self._sent and handles(self._child, own):
            self._send(own)
        elif signal.SIGTERM not in self.received:
            self.tree.terminate()

    def _send(self, number: int) -> None:
        self._sent.append(number)
        with suppress(ProcessLookupError):
            os.kill(self._child, number)


def _own_signal() -> int:
    """Return the signal that the job requests before the walltime; 0 if there is none."""
    return int(os.environ.get("TOOLKIT_SIGNAL") or 0)


def _keep_stacks(child: int, stacks: int, path: Path) -> None:
    """Write the stacks of the threads of the rank to a file, or its state if it is stopped or hangs in the kernel."""
    os.ftruncate(stacks, 0)  # of an earlier request
    os.lseek(stacks, 0, os.SEEK_SET)  # the rank shares the position
    # A program that replaced the process has no such handlers, and would be killed.
    can_answer = handles(child, STACK_SIGNAL)
    with suppress(ProcessLookupError):
        if int(status_of(child).get("SigBlk", "0"), 16) >> (FLIGHT_SIGNAL - 1) & 1:  # it waits for the signal
            os.kill(child, FLIGHT_SIGNAL)
        if can_answer:
            os.kill(child, STACK_SIGNAL)
    deadline = time.monotonic() + STACKS_PATIENCE_S
    written = 0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, written = written, os.fstat(stacks).st_size
        if 0 < written == before:  # the file no longer grows, so it is complete
            break
    text = os.pread(stacks, written, 0).decode(errors="replace")
    # In the terms of proc(5), such as `T (stopped)` or `D (disk sleep)`.
    state = status_of(child).get("State", "gone") + " and is not a Python script of the job" * (not can_answer)
    write_text(path, text or f"no response: process {child} is in state {state}\n")


def _end_with(launcher: int, child: int) -> None:
    """Kill the rank and its processes when the launcher exits, even by `kill -9`."""

    def end_group(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() == launcher:  # the terminal hung up, or only a thread of the launcher exited
            return
        end_descendants(os.getpid())
        if os.getpgrp() == os.getpid():  # launchers start each rank in its own process group
            os.killpg(0, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGHUP, end_group)
    signal_on_parent_death(signal.SIGHUP)
    end_group(signal.SIGHUP, None)  # the launcher may have exited before prctl took effect


def _silent_error(rank: int, code: int) -> dict[str, object]:
    """Return the error record for a rank that did not write one."""
    kind, reason, exit_code = "exit", f"exit code {code}", code
    if code < 0:
        name = signal.Signals(-code).name
        kind, exit_code = "signal", 128 - code
        reason = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return {
        "rank": rank, "host": socket.gethostname(), "kind": kind, "reason": reason, "exit_code": exit_code, "time": utc_now(),
    }  # fmt: skip
