"""The processes that a rank or a batch script has started, and how they end. Standard library only."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.supervise.proc import below, children_in_proc, status_of

__all__ = ["GRACE_S", "OWN_PROCESSES", "ProcessTree", "end_descendants", "handles"]

GRACE_S = 5.0  # between SIGTERM and SIGKILL for remaining processes: srun needs some of it to end its step
OWN_PROCESSES: set[int] = set()  # pids of children of this process that are not the program's
HANGING_S = 2.0  # a process that hangs in the kernel outlives even SIGKILL
POLL_S = 0.2
_PAUSE_S = 0.05
# On SIGTERM these kill what they started, within a second or at once; Slurm signals the steps of srun instead.
_LAUNCHERS = frozenset({
    "srun", "timeout", "mpirun", "mpiexec", "mpiexec.hydra", "mpirun.hydra", "hydra_pmi_proxy", "orterun", "prterun",
    "orted", "prted",
})  # fmt: skip
# The signals of a `trap ACTION SIGNAL...`.
_TRAP = re.compile(r"""\btrap[ \t]+(?:--[ \t]+)?(?:'[^']*'|"(?:\\.|[^"\\])*"|[^\s'";]+)((?:[ \t]+\w+)+)""")
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "ksh93", "mksh", "zsh", "csh", "tcsh", "fish", "busybox"})


@dataclass(frozen=True)
class Process:
    """One running process: the names of its command and its executable, and the masks SigCgt and SigBlk of proc(5)."""

    pid: int
    names: frozenset[str]  # a script has its own name, and its shell's
    handlers: int
    blocked: int

    def handles(self, number: int) -> bool:
        return bool(self.handlers >> (number - 1) & 1)

    def acts_on(self, number: int) -> bool:
        """Return whether it has a handler for a signal, or blocks it to accept it by sigwait."""
        return bool((self.handlers | self.blocked) >> (number - 1) & 1)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    process = _read(pid)
    return process is not None and process.handles(number)


class ProcessTree:
    """The processes below `root`, a child of this process. `sent` contains those that have received SIGTERM."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.sent: set[int] = set()
        self._spared: set[int] = set()

    def note_sent(self) -> None:
        """Note that Slurm or mpirun has sent SIGTERM to all of them: some treat a second one as a request to exit at once."""
        self.sent.update(one.pid for one in running_below(os.getpid()))

    def terminate(self) -> None:
        """Send SIGTERM once to each process that acts on it.

        A program with a handler passes the request to its own children, as torchrun does, or needs them to save, as it
        needs a data loader. A shell does neither, so its children receive SIGTERM, too. A parent without a handler exits,
        so that it starts nothing further; its children run on. A shell with a trap for EXIT only would run it before its
        programs have saved, although the trap may copy or delete what they save: it is stopped until then. Other processes
        without a handler, such as the `tee` of a pipeline, receive SIGTERM when the programs have saved.
        """
        children = _children_of_run(children_in_proc(is_whole=True))
        pending = _running([self.root])
        while pending:
            one = pending.pop()
            started = _running(children(one.pid))
            if one.names & _LAUNCHERS:
                pending += started
            elif started and one.names & _SHELLS and _traps_only_exit(one.pid):
                self._spared.add(one.pid)
                _signal(one.pid, signal.SIGSTOP)
                pending += started
            elif one.handles(signal.SIGTERM) or started:
                self._send(one.pid)
                pending += started if one.names & _SHELLS or not one.handles(signal.SIGTERM) else []
            else:
                self._spared.add(one.pid)
        threading.Thread(target=self._terminate_spared, name="spared", daemon=True).start()

    def signal_steps(self, number: int) -> None:
        """Send a signal other than SIGTERM to each srun, which forwards it to its step even while Slurm ends the job."""
        sruns = [one.pid for one in running_below(os.getpid()) if "srun" in one.names]
        children = children_in_proc(is_whole=True)
        helpers = {child for pid in sruns for child in children(pid)}  # srun forks one, of the same name
        for pid in set(sruns) - helpers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _terminate_spared(self) -> None:
        while any(self._is_saving(one) for one in running_below(os.getpid())):
            time.sleep(POLL_S)
        for pid in self._spared & {one.pid for one in running_below(os.getpid())}:
            self._send(pid)
            _signal(pid, signal.SIGCONT)

    def _is_saving(self, one: Process) -> bool:
        return "srun" in one.names or (one.pid in self.sent and not one.names & _SHELLS)

    def await_exit(self) -> None:
        """Return when no process that this process has started, directly or not, is running.

        Those that do not act on SIGTERM, such as daemons, have `GRACE_S`, since they do not save because of it.
        """
        deadline = time.monotonic() + GRACE_S
        while any(one.acts_on(signal.SIGTERM) or time.monotonic() < deadline for one in running_below(os.getpid())):
            time.sleep(POLL_S)

    def _send(self, pid: int) -> None:
        if pid not in self.sent:
            self.sent.add(pid)
            _signal(pid, signal.SIGTERM)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _traps_only_exit(pid: int) -> bool:
    """Return whether the text of a shell sets a trap for EXIT, and none for TERM, as far as it can be read."""
    try:
        _, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        texts = [argument for argument in arguments if "trap" in argument]
        files = [path for name in arguments if name and (path := Path(f"/proc/{pid}/cwd", name)).is_file()]
        texts += [path.read_text(encoding="utf-8", errors="replace") for path in files[:1]]
    except OSError:  # it has exited, or belongs to another user
        return False
    traps = " ".join(_TRAP.findall("\n".join(texts)))
    return bool(re.search(r"\b(EXIT|0)\b", traps, re.I)) and not re.search(r"\b((SIG)?TERM|15)\b", traps, re.I)


def end_descendants(pid: int, *, grace_s: float = 0.0) -> None:
    """End all processes below `pid`: with SIGTERM, and after `grace_s` with SIGKILL. Local runs that they started continue."""
    began = time.monotonic()
    termed: set[int] = set()
    while running := {one.pid for one in running_below(pid)}:
        elapsed_s = time.monotonic() - began
        if elapsed_s > grace_s + HANGING_S:
            return
        for one in running:
            with suppress(ProcessLookupError, PermissionError):
                if elapsed_s >= grace_s:
                    os.kill(one, signal.SIGKILL)
                elif one not in termed:
                    os.kill(one, signal.SIGTERM)
        termed |= running
        time.sleep(_PAUSE_S)


def running_below(root: int) -> list[Process]:
    """Return the running processes that `root` has started, directly or not, except those of other runs."""
    children = _children_of_run(children_in_proc())
    # The lists of children may lack one in rare cases, and the caller may take an empty result as the end of all.
    return _running(below(root, children)) or _running(below(root, children))


def _children_of_run(children: Callable[[int], Sequence[int]]) -> Callable[[int], Sequence[int]]:
    return lambda pid: [child for child in children(pid) if child not in OWN_PROCESSES and not _is_another_run(child)]


def _running(pids: Iterable[int]) -> list[Process]:
    return [process for pid in pids if (process := _read(pid)) is not None]


def _is_another_run(pid: int) -> bool:
    """Return whether it is the supervisor of a run without Slurm, whose ranks do not have this variable."""
    with suppress(OSError):
        return b"\0TOOLKIT_LOCAL=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _read(pid: int) -> Process | None:
    """Return a process; None if it has exited, even if its parent has not been notified of that yet."""
    try:
        executable = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # it has exited, or belongs to another user
        return None
    fields = status_of(pid)
    if fields.get("State", "X").startswith(("Z", "X")):
        return None
    names = frozenset((fields["Name"], executable.removesuffix(" (deleted)")))
    return Process(pid, names, *(int(fields.get(mask, "0"), 16) for mask in ("SigCgt", "SigBlk")))
