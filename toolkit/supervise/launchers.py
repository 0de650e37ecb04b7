"""How ranks are started: `srun`, `mpirun` or `local`. Each launcher is an argv, a method to stop and a method to kill.

A launcher runs in its own session, so that a Ctrl-C at the terminal reaches only the supervisor, which decides. The
launcher's own output goes to `logs/launcher.log`; each rank opens its own log.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.parent_death import die_with_parent
from toolkit.supervise.shape import Component, Shape

_DEATH = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: ", re.MULTILINE)
END_S = 5.0  # after TERM, and again after KILL


class Ranks(Protocol):
    """The running ranks of one attempt."""

    def exit_code(self) -> int | None:
        """None while the launcher runs, else its code (negative: the signal that ended it)."""

    def report_a_death(self) -> bool:
        """True if the launcher reports that a rank failed, while others may still run.

        It may be the only report of a rank that was killed together with its guard.
        """

    def forward_stop(self) -> bool:
        """Signal the ranks to save and exit. False if they only learn of it from the stop flag's file."""

    def ask_for_stacks(self) -> bool:
        """Signal the ranks with USR1 to write their stacks. False if signals do not reach them."""

    def terminate(self) -> None:
        """Send TERM to programs without toolkit's handlers; `kill` follows when their grace time is over."""

    def kill(self) -> None:
        """Kill the ranks now."""

    def abandon(self) -> None:
        """Kill the ranks without any request to Slurm, if the job's steps belong to another start by now."""


@dataclass
class LauncherProcess:
    """Ranks started by one launcher command."""

    process: subprocess.Popen[bytes]
    log: Path
    forwards_signals: bool

    def exit_code(self) -> int | None:
        return self.process.poll()

    def report_a_death(self) -> bool:
        # mpirun does not report a failed rank: it ends all ranks, and itself.
        return _DEATH.search(self.log.read_text(encoding="utf-8", errors="replace")) is not None

    def forward_stop(self) -> bool:
        return self._forward(signal.SIGUSR2)

    def ask_for_stacks(self) -> bool:
        return self._forward(signal.SIGUSR1)

    def _forward(self, number: signal.Signals) -> bool:
        if self.forwards_signals and self.process.poll() is None:
            self.process.send_signal(number)
        return self.forwards_signals

    def terminate(self) -> None:
        # srun does not forward TERM: it kills its ranks. It does forward USR2, which the guards translate to TERM.
        if not self._forward(signal.SIGUSR2) and self.process.poll() is None:
            _signal_group(self.process, signal.SIGTERM)

    def kill(self) -> None:
        end_session(self.process)

    def abandon(self) -> None:
        # srun would have Slurm cancel its step by number, and a later start counts its steps from 0 again. Its ranks
        # exit with it: they lose their launcher.
        _signal_group(self.process, signal.SIGKILL)
        _wait_for(self.process)


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own session; srun and mpirun end their ranks on TERM.

    One that does not exit is killed with its session.
    """
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        _wait_for(process)
    _signal_group(process, signal.SIGKILL)  # also what an exited launcher left in its session
    _wait_for(process)


def _wait_for(process: subprocess.Popen[Any]) -> None:
    """Wait for a limited time: a hanging file system keeps even a killed process alive."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


def _signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Signal a process that leads its own session, and all of that session."""
    if process.returncode is not None and Path(f"/proc/{process.pid}").exists():
        return  # its group is gone: the kernel has reused its number
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@dataclass
class LocalRanks:
    """Ranks that the supervisor started itself, without any launcher."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def exit_code(self) -> int | None:
        codes = self._codes()
        return None if None in codes else next((code for code in codes if code), 0)

    def report_a_death(self) -> bool:
        return any(self._codes())

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def forward_stop(self) -> bool:
        return self._send(signal.SIGUSR2)

    def ask_for_stacks(self) -> bool:
        return self._send(signal.SIGUSR1)

    def _send(self, number: signal.Signals) -> bool:
        for process in self.processes:  # the guards, which forward it
            if process.poll() is None:
                process.send_signal(number)
        return True

    def terminate(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # the guard forwards it

    def kill(self) -> None:
        for process in self.processes:
            _signal_group(process, signal.SIGKILL)
        for process in self.processes:
            _wait_for(process)

    def abandon(self) -> None:
        self.kill()


def launch_local(
    shape: Shape, environment: Mapping[str, str], attempt: AttemptDirectory, rank_program: Sequence[str]
) -> Ranks:
    """Start every rank as a child of the supervisor, on this host."""
    ranks = LocalRanks()
    for rank in range(shape.ranks):
        identity = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(shape.ranks),
            "LOCAL_WORLD_SIZE": str(shape.ranks), "GROUP_RANK": "0",
        }  # fmt: skip
        try:
            ranks.processes.append(_start(rank_program, {**environment, **identity}, attempt))
        except OwnFailureError:
            ranks.kill()
            raise
    return ranks


def launch_srun(
    shape: Shape,
    environment: Mapping[str, str],
    attempt: AttemptDirectory,
    rank_program: Sequence[str],
    *,
    mpi: str,
    options: Sequence[str],
) -> Ranks:
    """Start the ranks as one Slurm step of this allocation.

    srun only reports a rank's death. If it ended the other ranks itself, it would drop the failed rank's last output (of
    two containers without an image, one in four had none), and it would end ranks that still work a while after
    others are done.
    """
    of_all = [
        "--distribution=block", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--input=none",
        *([f"--mpi={mpi}"] if mpi else []), *options,
    ]  # fmt: skip
    argv = srun_of_groups([[*_ranks_of(one), *of_all] for one in shape.components], rank_program)
    return _launch(argv, environment, attempt, forwards_signals=True)


def _ranks_of(component: Component) -> list[str]:
    """srun's options for the ranks of one component."""
    counts = [
        f"--nodes={component.nodes}",
        f"--ntasks={component.ranks}",
        f"--ntasks-per-node={component.ranks_per_node}",
    ]
    # Since Slurm 22.05 srun no longer inherits the job's --cpus-per-task.
    return [*counts, f"--cpus-per-task={component.cpus_per_rank}"] if component.cpus_per_rank else counts


def srun_of_groups(options: Sequence[Sequence[str]], program: Sequence[str]) -> list[str]:
    """The srun command of one step over all components of the job, given the options for each."""
    argv = ["srun"]
    for group, arguments in enumerate(options):
        argv += [*([":"] if group else []), *([f"--het-group={group}"] if len(options) > 1 else []), *arguments]
    return [*argv, *program]


def srun_on_every_node(nodes: Sequence[int], program: Sequence[str]) -> list[str]:
    """The srun command of one task on each node, given the number of nodes in each component."""
    return srun_of_groups(
        [
            [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mpi=none", "--kill-on-bad-exit=0", "--input=none"]
            for count in nodes
        ],
        program,
    )  # fmt: skip


def launch_mpirun(
    shape: Shape,
    environment: Mapping[str, str],
    attempt: AttemptDirectory,
    rank_program: Sequence[str],
    *,
    program: str,
    options: Sequence[str],
) -> Ranks:
    """Start the ranks with Open MPI's or MPICH's mpirun, which `mpirun --version` identifies."""
    path = find_mpirun(program, environment)
    if path is None:
        raise OwnFailureError(
            f"{program or 'mpirun'} not found on PATH or next to {sys.executable}",
            fix='install an MPI (`pip install "toolkit[mpi]"`), or set launcher.kind = "local"',
        )
    version = _version_of(path)
    count = ["-n", str(shape.ranks)]
    if "Open MPI" in version or "PRTE" in version.upper():
        argv = [path, *count, "--map-by", f"ppr:{shape.leader.ranks_per_node}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        if os.geteuid() == 0:
            argv.append("--allow-run-as-root")
        if shape.nodes > 1:  # its remote daemons do not forward the environment by default
            argv += [argument for name in sorted(environment) if _is_forwarded(name) for argument in ("-x", name)]
    else:
        argv = [path, *count, "-ppn", str(shape.leader.ranks_per_node), "-bind-to", "none"]
    # Hydra's ranks are killed by a USR2 to their mpirun, so toolkit forwards no signal through either.
    return _launch([*argv, *options, *rank_program], environment, attempt, forwards_signals=False)


def _version_of(mpirun: str) -> str:
    try:
        return subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OwnFailureError(
            f"cannot run {mpirun} --version: {error}", fix="set launcher.mpirun to one that runs on this node"
        ) from error


def find_mpirun(program: str, environment: Mapping[str, str]) -> str | None:
    """The mpirun to use: the site's, else the one next to the running interpreter (a wheel's), else PATH's."""
    if program:
        return shutil.which(program, path=environment.get("PATH"))
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun", path=environment.get("PATH"))


def _is_forwarded(name: str) -> bool:
    return not name.startswith(("SLURM_", "OMPI_", "PMIX_", "PMI_")) and name.replace("_", "").isalnum()


def _launch(
    argv: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, *, forwards_signals: bool
) -> Ranks:
    return LauncherProcess(_start(argv, environment, attempt), attempt.launcher_log, forwards_signals)


def _start(argv: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory) -> subprocess.Popen[bytes]:
    with os.fdopen(open_append(attempt.launcher_log), "ab") as log:
        try:
            return subprocess.Popen(
                argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise OwnFailureError(
                f"cannot start {argv[0]}: {error.strerror}",
                fix="load the site's module in [env] modules, or set launcher.kind",
            ) from error
