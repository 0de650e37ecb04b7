"""Run Slurm commands with explicit output formats, a clean environment, a timeout, and readable errors.

A user's SQUEUE_FORMAT or SLURM_TIME_FORMAT would change the output of the commands. SBATCH_* would override the script,
which already contains the values of those variables that correspond to a key.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.rundir.files import typed_path
from toolkit.slurm.job_facts import (
    JobFacts,
    base_of,
    of_jobs,
    outlived,
    read_sacct,
    read_squeue,
    run_state,
    sacct_argv,
    squeue_argv,
    unreadable_end,
)
from toolkit.slurm.records import UnreadableError, for_cluster, has_no_address, new_mark, with_cluster_option
from toolkit.slurm.refusals import refusal_of
from toolkit.terminal.talk import plain, say

__all__ = [
    "Answer", "NoAnswerError", "Slurm", "TimedOutError", "UnknownClusterError", "one_command", "printed_commands",
    "prints_commands", "slurm_of_site",
]  # fmt: skip

_SCRUBBED = (
    "SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN", "SCONTROL_",
    "SCANCEL_",
)  # fmt: skip
# With this, squeue and sacct do not truncate the tasks of an array (`1_[3,5,...]`).
_QUERY = {"SLURM_BITSTR_LEN": "0"}
# Signals that do not kill a process by default; any other signal counts as the cause of an exit.
_HARMLESS = (
    "SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGRTMIN", "SIGRTMAX",
)  # fmt: skip
_DEADLY = {sign.value: sign.name for sign in signal.Signals if sign.name not in _HARMLESS}
_OF_SSH = 255
# Messages of ssh when it exits with 255, in case a wrapper of the site runs Slurm commands on another host.
_LOST_CONNECTION = re.compile(
    r"\b(?:closed|connection|broken pipe|disconnect\w*|reset by|timed out|timeout|killed by signal)\b|^(?:ssh|kex_\w+): ",
    re.IGNORECASE | re.MULTILINE,
)


# The facts about each queried job, None for a job that Slurm does not know; or the error if Slurm did not respond.
Answer = Mapping[str, JobFacts | None] | ToolkitError


class NoAnswerError(SchedulerRefusedError):
    """A Slurm command exited without a response; Slurm may still have carried out the request."""


class TimedOutError(NoAnswerError):
    """A Slurm command exceeded its timeout."""


class UnknownClusterError(SchedulerRefusedError):
    """The cluster is not in the accounting database, or is down."""


@dataclass(frozen=True)
class Slurm:
    """Runs the Slurm commands for one cluster.

    `configuration` is the path of a slurm.conf, "" for the default. `cluster` is another cluster in the same accounting
    database, "" for the cluster of the configuration.
    """

    configuration: str = ""
    cluster: str = ""
    echo: bool = False  # print each command on stderr before it runs
    timeout_s: float = 30.0
    # Recent failures, after which one toolkit command does not query a slurmctld again; None: query it each time.
    silences: Silences | None = field(default=None, compare=False, repr=False)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for Slurm commands."""
        source = os.environ if base is None else base
        environment = {name: value for name, value in source.items() if not name.startswith(_SCRUBBED)}
        if self.configuration:
            environment["SLURM_CONF"] = self.configuration
        return environment

    def _environment_of(self, argv: Sequence[str], base: Mapping[str, str] | None) -> dict[str, str]:
        return self.environment(base) | (_QUERY if argv[0] in ("squeue", "sacct") else {})

    def call(self, argv: Sequence[str], *, base: Mapping[str, str] | None = None) -> str:
        """Run one command in the environment `base`, by default that of this process, and return its stdout.

        Raises:
            NotFoundError: the command is not on PATH.
            SchedulerRefusedError: the command failed.
            UnknownClusterError: the cluster does not exist.
            NoAnswerError: the command did not finish within `timeout_s`, or was killed.
        """
        if self.silences is None:
            return self._ask(argv, base)
        if (silence := self.silences.of(self._controller, argv)) is not None:
            raise silence
        try:
            return self._ask(argv, base)
        except SchedulerRefusedError as error:
            self.silences.remember(self._controller, argv, error)
            raise

    @property
    def _controller(self) -> Controller:
        return os.environ.get("PATH", ""), self.configuration or os.environ.get("SLURM_CONF", ""), self.cluster

    def _ask(self, argv: Sequence[str], base: Mapping[str, str] | None) -> str:
        argv = for_cluster(argv, self.cluster)
        self._prepare(argv)
        try:
            with (self.silences or Silences()).report_when_slow(argv[0], self.timeout_s):
                done = subprocess.run(
                    argv, capture_output=True, text=True, errors="replace", env=self._environment_of(argv, base), timeout=self.timeout_s, check=False,
                )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TimedOutError(
                f"{argv[0]} did not respond within {self.timeout_s:.0f} s",
                fix=with_cluster_option("`scontrol ping` shows whether Slurm is up", self.cluster),
            ) from error
        if done.returncode:
            if self.cluster and has_no_address(done.stderr):
                raise self.unknown_cluster(refusal_of(done.stderr)[0])
            refused = _failure(argv[0], done)
            refused.fix = with_cluster_option(refused.fix, self.cluster)
            raise refused
        return done.stdout

    def begin(self, argv: Sequence[str], *, base: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
        """Start a command in its own session with output to the descriptor `output`, which this process then closes."""
        argv = for_cluster(argv, self.cluster)
        try:
            self._prepare(argv)
            return subprocess.Popen(
                argv, env=self._environment_of(argv, base), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(output)

    def unknown_cluster(self, output: str) -> UnknownClusterError:
        """Return the error for a cluster that is unknown or down, which Slurm commands do not distinguish."""
        try:
            listed = replace(self, cluster="").call(
                ["sacctmgr", "--noheader", "--parsable2", "show", "clusters", "format=Cluster"]
            )
        except (NotFoundError, SchedulerRefusedError):
            return UnknownClusterError(
                f"cluster {self.cluster!r} not found: {output}",
                fix="ask the site whether its clusters share accounting, or omit -M and the key cluster",
            )
        names = sorted(listed.split())
        others = ", ".join(name for name in names if name != self.cluster)
        if self.cluster in names:
            return UnknownClusterError(
                f"cluster {self.cluster!r} is down: accounting has no address for its slurmctld",
                fix=f"wait until it is up, or choose another cluster with -M: {others}",
            )
        return UnknownClusterError(
            f"cluster {self.cluster!r} not found in the accounting database", fix=f"choose one with -M: {others}"
        )

    def _prepare(self, argv: Sequence[str]) -> None:
        if shutil.which(argv[0]) is None:
            raise NotFoundError(f"{argv[0]} not found on PATH", fix="load the Slurm module, or use --site local")
        # If the file does not exist, Slurm commands retry for a minute before they fail.
        if self.configuration and not Path(self.configuration).exists():
            raise NotFoundError(
                "slurm.conf of the site not found",
                where=self.configuration,
                fix="fix scheduler.conf in the site file, or choose another site with --site",
            )
        if self.echo:
            sys.stderr.write(plain(f"+ {shlex.join(argv)}") + "\n")  # the user passed --print-cmd

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobFacts]:
        """Return the facts about each job (`123`) or task (`123_4`) that Slurm still knows, from squeue or else sacct.

        If squeue does not respond, or its output cannot be parsed, only final states from sacct are used; the other
        jobs have a reason instead of a state. If there are no final states either, SchedulerRefusedError is raised.
        """
        facts = self._facts(list(dict.fromkeys(job_ids)))
        return {job: replace(fact, cluster=self.cluster) for job, fact in facts.items()}

    def _facts(self, wanted: Sequence[str]) -> dict[str, JobFacts]:
        if not wanted:
            return {}
        silence: ToolkitError | None = None
        facts: dict[str, JobFacts] = {}
        try:
            facts = self._queued(wanted)
        except SchedulerRefusedError as error:
            silence = error
        missing = [job for job in wanted if job not in facts]
        try:
            ended = self._accounted(missing)
        except UnreadableError as error:
            if silence is None:
                return facts | {job: unreadable_end(job, error) for job in missing}
            ended = {}
        if silence is None:
            return facts | {job: outlived(fact) for job, fact in ended.items()}
        ended = {job: fact for job, fact in ended.items() if run_state(fact.state).final}
        if not ended:
            raise silence
        return {job: ended.get(job, JobFacts(job, "", reason=silence.message, source="none")) for job in wanted}

    def _queued(self, wanted: Sequence[str]) -> dict[str, JobFacts]:
        mark = new_mark()
        try:
            text = self.call(squeue_argv(dict.fromkeys(map(base_of, wanted)), mark))
        except SchedulerRefusedError as error:
            if "Invalid job id" in error.message:  # squeue reports this if it has purged the only queried job
                return {}
            raise
        return of_jobs(read_squeue(text, mark), wanted)

    def accounted(self, wanted: Sequence[str]) -> dict[str, JobFacts]:
        """Return the facts from accounting, the only source for who cancelled a job; {} without accounting."""
        try:
            return self._accounted(wanted)
        except UnreadableError:
            return {}

    def _accounted(self, wanted: Sequence[str]) -> dict[str, JobFacts]:
        if not wanted or shutil.which("sacct") is None:
            return {}
        mark = new_mark()
        try:
            text = self.call(sacct_argv(dict.fromkeys(map(base_of, wanted)), mark))
        except SchedulerRefusedError:  # this cluster has no accounting, or slurmdbd does not respond
            return {}
        return of_jobs(read_sacct(text, mark), wanted)

    def query(self, job_ids: Iterable[str]) -> Answer:
        """Return the facts about each job, None for a job that Slurm does not know; an error if Slurm does not respond."""
        wanted = list(job_ids)
        try:
            return {**dict.fromkeys(wanted), **self.jobs(wanted)}
        except (SchedulerRefusedError, NotFoundError) as error:
            return error

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; with --full, Slurm also sends TERM to the children of the batch script, such as the supervisor."""
        self.call(["scancel", "--full", *job_ids])

    def requeue(self, job_id: str) -> None:
        """Requeue a running batch job or the running tasks of an array; without Incomplete, all tasks run again."""
        self.call(["scontrol", "requeue", "Incomplete", job_id])


def _failure(command: str, done: subprocess.CompletedProcess[str]) -> SchedulerRefusedError:
    """Return the error for the exit code of a command; a shell wrapper returns 128 plus the signal number.

    sbatch exits with 255 for an invalid option, and ssh for a lost connection; the message distinguishes the two.
    """
    output = done.stderr or done.stdout
    message, fix = refusal_of(output)
    number = -done.returncode if done.returncode < 0 else done.returncode - 128
    if number in _DEADLY or done.returncode < 0:
        problem = f"was killed by {_DEADLY.get(number, f'signal {number}')}"
    elif done.returncode == _OF_SSH and (not message or _LOST_CONNECTION.search(output)):
        problem = f"lost its connection, with exit code {_OF_SSH}"
    else:
        return SchedulerRefusedError(f"{command}: {message or f'exit code {done.returncode}'}", fix=fix)
    return NoAnswerError(f"{command} {problem}" + (f": {message}" if message else ""), fix=fix)


class SchedulerSettings(Protocol):
    """The keys of [scheduler] that Slurm commands need."""

    @property
    def conf(self) -> str: ...

    @property
    def cluster(self) -> str: ...


def slurm_of_site(scheduler: SchedulerSettings, *, cluster: str = "") -> Slurm:
    """Return the Slurm commands for a site, for `cluster` or else for the cluster in the site file."""
    conf = scheduler.conf
    return Slurm(
        configuration=str(typed_path(conf)) if conf else "",
        cluster=cluster or scheduler.cluster,
        echo=prints_commands(),
        silences=silences_of_this_command(),
    )


SLOW_S = 2.0  # longer waits are reported
# Longer than the pauses between the queries of one command, but short, so that a command that waits for Slurm retries.
REMEMBERED_S = 5.0
_PATTERNS = ("unable to contact slurm controller", "timed out", "did not answer", "did not respond")
# Commands that query slurmctld and whose result toolkit can do without. sbatch is never skipped.
_ASKING = ("squeue", "sinfo", "scontrol", "scancel")

# PATH, the configuration and the cluster, which determine the slurmctld that a command queries.
Controller = tuple[str, str, str]


class Silences:
    """The slurmctlds that recently did not respond to the current toolkit command."""

    def __init__(self) -> None:
        self._silent: dict[Controller, tuple[float, SchedulerRefusedError]] = {}
        self._reported_at = float("-inf")

    @contextmanager
    def report_when_slow(self, command: str, timeout_s: float) -> Iterator[None]:
        """After `SLOW_S`, report on stderr that a command is waiting for Slurm, and the maximum wait."""
        timer = threading.Timer(SLOW_S, self._tell, [command, timeout_s])
        timer.daemon = True
        if timeout_s > 2 * SLOW_S:  # do not report shorter waits
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self, command: str, timeout_s: float) -> None:
        if time.monotonic() - self._reported_at >= SLOW_S:  # report concurrent queries only once
            self._reported_at = time.monotonic()
            say(f"Slurm has not responded to {command} yet; waiting up to {timeout_s:.0f} s")

    def of(self, controller: Controller, argv: Sequence[str]) -> SchedulerRefusedError | None:
        """Return the recent failure of the slurmctld that a command would query; None if there is none."""
        when, error = self._silent.get(controller, (float("-inf"), None))
        return copy.copy(error) if argv[0] in _ASKING and time.monotonic() - when < REMEMBERED_S else None

    def remember(self, controller: Controller, argv: Sequence[str], error: SchedulerRefusedError) -> None:
        """Record a failure if slurmctld did not respond; an error message from slurmctld is a response."""
        if argv[0] in _ASKING and any(pattern in error.message.lower() for pattern in _PATTERNS):
            self._silent[controller] = (time.monotonic(), error)


_OF_THIS_COMMAND: ContextVar[Silences | None] = ContextVar("silences of this command", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Make all queries in this context share one record of failures, as in one toolkit command."""
    before = _OF_THIS_COMMAND.set(Silences())
    try:
        yield
    finally:
        _OF_THIS_COMMAND.reset(before)


_PRINTS_COMMANDS: ContextVar[bool] = ContextVar("--print-cmd was given", default=False)


@contextmanager
def printed_commands() -> Iterator[None]:
    """Print each Slurm command on stderr before it runs, within this context."""
    before = _PRINTS_COMMANDS.set(True)
    try:
        yield
    finally:
        _PRINTS_COMMANDS.reset(before)


def prints_commands() -> bool:
    """Return whether the current toolkit command prints the Slurm commands that it runs."""
    return _PRINTS_COMMANDS.get()


def silences_of_this_command() -> Silences | None:
    """Return the record of failures of the current toolkit command; None outside of `one_command`."""
    return _OF_THIS_COMMAND.get()
