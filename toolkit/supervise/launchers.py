"""Launchers for ranks: `srun`, `mpirun` and `local`. Each one can start ranks, signal them and kill them.

A launcher runs in its own session, so that a Ctrl-C at the terminal reaches only the supervisor. The launcher's
own output goes to `logs/launcher.log`; each rank opens its own log.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.mpi_family import OPEN_MPI, family_of_version
from toolkit.supervise.parent_death import die_with_parent
from toolkit.supervise.process_tree import end_descendants
from toolkit.supervise.rank_files import signal_guards_here
from toolkit.supervise.shape import Component, Shape

_DEATH = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: ", re.MULTILINE)
TerminateSteps = Callable[[int, Callable[[], bool]], None]
END_S = 5.0  # time for a process to exit after SIGTERM, and again after SIGKILL


class Ranks(Protocol):
    """The running ranks of one attempt."""

    def exit_code(self) -> int | None:
        """Return the launcher's exit code, negative if a signal killed it; None while it runs."""

    def report_a_death(self) -> bool:
        """Return whether the launcher reports that a rank failed, while others may still run.

        This may be the only trace of a rank that was killed together with its guard.
        """

    def forward_stop(self) -> bool:
        """Signal the ranks to save and exit. Return False if only the stop flag file can reach them."""

    def ask_for_stacks(self) -> bool:
        """Send SIGUSR1 to the ranks, whose guards then write stacks. Return False if it cannot be forwarded."""

    def terminate(self) -> None:
        """Make guards send the next stop signal to programs without toolkit's handlers: `job.signal`, then SIGTERM."""

    def kill(self) -> None:
        """Kill the ranks immediately."""

    def abandon(self) -> None:
        """Kill the ranks without any request to Slurm, because a newer start may use the same step ids by now."""


@dataclass
class LauncherProcess:
    """The ranks that one launcher command has started."""

    process: subprocess.Popen[bytes]
    attempt: AttemptDirectory
    forwards_signals: bool

    def exit_code(self) -> int | None:
        return self.process.poll()

    def report_a_death(self) -> bool:
        # mpirun does not report a failed rank: it kills all ranks and exits.
        return _DEATH.search(self.attempt.launcher_log.read_text(encoding="utf-8", errors="replace")) is not None

    def forward_stop(self) -> bool:
        return self._forward(signal.SIGUSR2)

    def ask_for_stacks(self) -> bool:
        return self._forward(signal.SIGUSR1)

    def _forward(self, number: int) -> bool:
        if self.forwards_signals and self.process.poll() is None:
            self.process.send_signal(number)
        return self.forwards_signals

    def terminate(self) -> None:
        # On SIGTERM, srun and mpirun kill their ranks soon. The guards translate SIGUSR2, which srun forwards.
        if self._forward(signal.SIGUSR2) or self.process.poll() is not None:
            return
        if not signal_guards_here(self.attempt, signal.SIGUSR2):  # mpirun then sends SIGTERM to all of them
            _signal_group(self.process, signal.SIGTERM)

    def kill(self) -> None:
        end_session(self.process)

    def abandon(self) -> None:
        # On SIGTERM, srun would cancel its step by id, which may now be a step of a later start: ids begin at 0 again.
        # After SIGKILL the ranks exit, because they lose their launcher.
        _signal_group(self.process, signal.SIGKILL)
        _wait_for(self.process)


def end_session(process: subprocess.Popen[Any]) -> None:
    """Terminate a session leader; srun and mpirun end their ranks on SIGTERM.

    Afterwards, kill whatever is left of its session.
    """
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        _wait_for(process)
    _signal_group(process, signal.SIGKILL)  # this also kills processes that an exited launcher left
    _wait_for(process)


def _wait_for(process: subprocess.Popen[Any]) -> None:
    """Wait at most `END_S`: a process that hangs on a file system outlives even SIGKILL."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


def _signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal to the process group of a session leader."""
    if process.returncode is not None and Path(f"/proc/{process.pid}").exists():
        return  # its group has exited, and another process has its pid
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@dataclass
class LocalRanks:
    """Ranks that the supervisor has started itself, without a launcher."""

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

    def _send(self, number: int) -> bool:
        for process in self.processes:  # these processes are the guards, which forward the signal
            if process.poll() is None:
                process.send_signal(number)
        return True

    def terminate(self) -> None:
        self.forward_stop()  # the guard translates the signal

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:  # a guard that is stopped still adopts the orphans of its rank
                process.send_signal(signal.SIGSTOP)
                end_descendants(process.pid)
            _signal_group(process, signal.SIGKILL)
        for process in self.processes:
            _wait_for(process)

    def abandon(self) -> None:
        self.kill()


@dataclass
class ScriptRanks(LocalRanks):
    """The guard of a batch script on this host; srun starts the steps of the script on any node.

    Attributes:
        terminate_steps: sends SIGTERM to the steps of a guard; its second argument tells whether the guard has exited.
        has_step_signal: whether the script requests a signal for its steps with --signal, which they receive first.
    """

    terminate_steps: TerminateSteps = lambda _guard, _is_over: None
    has_step_signal: bool = False

    def terminate(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # the guard then signals the processes on this host
                if not self.has_step_signal:
                    # srun would kill its step on SIGTERM. Slurm may respond late, but a kill must not wait for that.
                    arguments = process.pid, lambda process=process: process.poll() is not None
                    threading.Thread(target=self.terminate_steps, args=arguments, daemon=True).start()
        self.has_step_signal = False

    def pass_signal(self, number: int) -> None:
        """Send a signal to the guard, which passes it to the script."""
        self._send(number)


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


def launch_script(
    environment: Mapping[str, str],
    attempt: AttemptDirectory,
    guard_program: Sequence[str],
    *,
    copies_output: bool,
    terminate_steps: TerminateSteps,
    has_step_signal: bool,
) -> Ranks:
    """Start the guard of a batch script on this host, without the variables of a rank.

    If `copies_output`, the guard copies the output of the script to stdout and stderr of this process.
    `terminate_steps` and `has_step_signal` are those of `ScriptRanks`.
    """
    outputs = (os.dup(1), os.dup(2)) if copies_output else ()
    own = {"TOOLKIT_RANK": "0"} | ({"TOOLKIT_OUTPUTS": " ".join(map(str, outputs))} if outputs else {})
    try:
        guard = _start(guard_program, {**environment, **own}, attempt, pass_fds=outputs)
        return ScriptRanks([guard], terminate_steps, has_step_signal)
    finally:
        for descriptor in outputs:
            os.close(descriptor)


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

    The options make srun report a failed rank without ending the others. Otherwise it would drop the last output of the
    failed rank (in tests with two containers without an image, one in four had none), and kill ranks that still work a
    while after others are done.
    """
    of_all = [
        "--distribution=block", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--input=none",
        *([f"--mpi={mpi}"] if mpi else []), *options,
    ]  # fmt: skip
    argv = srun_of_groups([[*_ranks_of(one), *of_all] for one in shape.components], rank_program)
    return _launch(argv, environment, attempt, forwards_signals=True)


def _ranks_of(component: Component) -> list[str]:
    """Return the srun options for the ranks of one component."""
    counts = [
        f"--nodes={component.nodes}",
        f"--ntasks={component.ranks}",
        f"--ntasks-per-node={component.ranks_per_node}",
    ]
    # Since Slurm 22.05 srun no longer inherits the job's --cpus-per-task.
    return [*counts, f"--cpus-per-task={component.cpus_per_rank}"] if component.cpus_per_rank else counts


def srun_of_groups(options: Sequence[Sequence[str]], program: Sequence[str]) -> list[str]:
    """Return the srun command of one step over all components of the job, given the options for each."""
    argv = ["srun"]
    for group, arguments in enumerate(options):
        argv += [*([":"] if group else []), *([f"--het-group={group}"] if len(options) > 1 else []), *arguments]
    return [*argv, *program]


def srun_on_every_node(nodes: Sequence[int], program: Sequence[str]) -> list[str]:
    """Return the srun command of one task on each node, given the number of nodes in each component."""
    return srun_of_groups(
        [
            [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mpi=none", "--kill-on-bad-exit=0", "--input=none",
             "--overlap"]  # another step of the allocation may hold the CPUs
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
    count = ["-n", str(shape.ranks)]
    if family_of_version(_version_of(path)) == OPEN_MPI:
        argv = [path, *count, "--map-by", f"ppr:{shape.leader.ranks_per_node}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        if os.geteuid() == 0:
            argv.append("--allow-run-as-root")
        if shape.nodes > 1:  # its remote daemons do not forward the environment by default
            argv += [argument for name in sorted(environment) if _is_forwarded(name) for argument in ("-x", name)]
    else:
        argv = [path, *count, "-ppn", str(shape.leader.ranks_per_node), "-bind-to", "none"]
    # Hydra's mpirun kills its ranks on SIGUSR2, so toolkit forwards no signals through either mpirun.
    return _launch([*argv, *options, *rank_program], environment, attempt, forwards_signals=False)


def _version_of(mpirun: str) -> str:
    try:
        return subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OwnFailureError(
            f"cannot run {mpirun} --version: {error}", fix="set launcher.mpirun to an mpirun that runs on this node"
        ) from error


def find_mpirun(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of mpirun: the site's, else one next to the interpreter (from a wheel), else one on PATH."""
    if program:
        return shutil.which(program, path=environment.get("PATH"))
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun", path=environment.get("PATH"))


def _is_forwarded(name: str) -> bool:
    return not name.startswith(("SLURM_", "OMPI_", "PMIX_", "PMI_")) and name.replace("_", "").isalnum()


def _launch(
    argv: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, *, forwards_signals: bool
) -> Ranks:
    return LauncherProcess(_start(argv, environment, attempt), attempt, forwards_signals)


def _start(
    argv: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, *, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    with os.fdopen(open_append(attempt.launcher_log), "ab") as log:
        try:
            return subprocess.Popen(
                argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=die_with_parent, pass_fds=pass_fds,
            )  # fmt: skip
        except OSError as error:
            raise OwnFailureError(
                f"cannot start {argv[0]}: {error.strerror}",
                fix="add the launcher's module to [env] modules of the site file, or set launcher.kind",
            ) from error
