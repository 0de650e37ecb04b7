"""Calls of Slurm's commands: explicit formats, a cleaned environment, a time-out, and readable errors.

A user's SQUEUE_FORMAT or SLURM_TIME_FORMAT would change what the commands print, and SBATCH_* would override the
script, which contains those that correspond to a key already.
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
# For squeue and sacct: the tasks of an array are not truncated (`1_[3,5,...]`).
_QUERY = {"SLURM_BITSTR_LEN": "0"}
# Signals that kill a process without its own request.
_HARMLESS = (
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGWINCH",
    "SIGRTMIN",
    "SIGRTMAX",
)
_DEADLY = {sign.value: sign.name for sign in signal.Signals if sign.name not in _HARMLESS}
_OF_SSH = 255
# What ssh prints when it exits with 255, in a site's wrapper that runs Slurm's commands on another host.
_LOST_CONNECTION = re.compile(
    r"\b(?:closed|connection|broken pipe|disconnect\w*|reset by|timed out|timeout|killed by signal)\b|^(?:ssh|kex_\w+): ",
    re.IGNORECASE | re.MULTILINE,
)


# Slurm's facts by each job id of a query, None of a job that it does not know; or the error if it did not respond.
Answer = Mapping[str, JobFacts | None] | ToolkitError


class NoAnswerError(SchedulerRefusedError):
    """A Slurm command exited without an answer; Slurm may have carried out the request."""


class TimedOutError(NoAnswerError):
    """A Slurm command exceeded its time-out."""


class UnknownClusterError(SchedulerRefusedError):
    """The named cluster is not in accounting, or is down."""


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands for the users of one cluster.

    `configuration` is a slurm.conf, "" for the default; `cluster` is another cluster of the same accounting, "" for the
    configuration's own.
    """

    configuration: str = ""
    cluster: str = ""
    echo: bool = False  # print each command on stderr before it runs
    timeout_s: float = 30.0
    # A slurmctld that just failed to respond is not queried again; without `silences` it is.
    silences: Silences | None = field(default=None, compare=False, repr=False)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for Slurm's commands."""
        source = os.environ if base is None else base
        environment = {name: value for name, value in source.items() if not name.startswith(_SCRUBBED)}
        if self.configuration:
            environment["SLURM_CONF"] = self.configuration
        return environment

    def _environment_of(self, argv: Sequence[str], base: Mapping[str, str] | None) -> dict[str, str]:
        return self.environment(base) | (_QUERY if argv[0] in ("squeue", "sacct") else {})

    def call(self, argv: Sequence[str], *, base: Mapping[str, str] | None = None) -> str:
        """Run one command in the environment `base`, by default this process's, and return its stdout.

        Raises:
            NotFoundError: the command is not on PATH.
            SchedulerRefusedError: it failed.
            UnknownClusterError: the cluster does not exist.
            NoAnswerError: it did not respond within `timeout_s`, or was killed.
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
        """Start a command that outlives this terminal and writes to the descriptor `output`, which is closed here."""
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
        """The error for an unknown cluster or one that is down, which Slurm's commands do not distinguish."""
        try:
            listed = replace(self, cluster="").call(
                ["sacctmgr", "--noheader", "--parsable2", "show", "clusters", "format=Cluster"]
            )
        except (NotFoundError, SchedulerRefusedError):
            return UnknownClusterError(
                f"cluster {self.cluster!r} not found: {output}",
                fix="only accounting knows other clusters: ask the site, or remove the cluster",
            )
        names = sorted(listed.split())
        others = ", ".join(name for name in names if name != self.cluster)
        if self.cluster in names:
            return UnknownClusterError(
                f"cluster {self.cluster!r} is down: accounting lists it without an address of its slurmctld",
                fix=f"wait for it, or choose another one with -M: {others}",
            )
        return UnknownClusterError(
            f"cluster {self.cluster!r} not found in this Slurm's accounting", fix=f"choose one with -M: {others}"
        )

    def _prepare(self, argv: Sequence[str]) -> None:
        if shutil.which(argv[0]) is None:
            raise NotFoundError(f"{argv[0]} not found on PATH", fix="load Slurm's module, or use --site local")
        # Without the file, the commands would search for it for a minute.
        if self.configuration and not Path(self.configuration).exists():
            raise NotFoundError(
                "the site's slurm.conf not found",
                where=self.configuration,
                fix="fix scheduler.conf of the site, or choose another with --site",
            )
        if self.echo:
            sys.stderr.write(plain(f"+ {shlex.join(argv)}") + "\n")  # requested by --print-cmd

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobFacts]:
        """Facts about each job (`123`) or task (`123_4`) that Slurm still has: from squeue first, then from sacct.

        If squeue does not respond, or its output cannot be parsed, only ends from accounting count as facts; the other
        jobs have the reason instead of a state. Raises SchedulerRefusedError if squeue did not respond and nothing is
        known.
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
            if "Invalid job id" in error.message:  # squeue's message for a single job that it has forgotten
                return {}
            raise
        return of_jobs(read_squeue(text, mark), wanted)

    def accounted(self, wanted: Sequence[str]) -> dict[str, JobFacts]:
        """The facts of jobs or tasks in accounting, the only source for who cancelled one; {} without accounting."""
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
        except SchedulerRefusedError:  # accounting is off on this cluster, or does not respond
            return {}
        return of_jobs(read_sacct(text, mark), wanted)

    def query(self, job_ids: Iterable[str]) -> Answer:
        """The facts of each job or task, None of one that Slurm does not know; the error if Slurm does not respond."""
        wanted = list(job_ids)
        try:
            return {**dict.fromkeys(wanted), **self.jobs(wanted)}
        except (SchedulerRefusedError, NotFoundError) as error:
            return error

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; Slurm sends TERM to the batch script's children and to the supervisor."""
        self.call(["scancel", "--full", *job_ids])

    def requeue(self, job_id: str) -> None:
        """Requeue a running batch job, or an array's running tasks; plain `requeue` repeats finished ones, too."""
        self.call(["scontrol", "requeue", "Incomplete", job_id])


def _failure(command: str, done: subprocess.CompletedProcess[str]) -> SchedulerRefusedError:
    """The error for a command's exit code; a wrapping shell returns 128 plus the signal's number.

    255 is sbatch's code for an invalid option, and ssh's for a lost connection, which the message shows.
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
    """What Slurm's commands need of a site's [scheduler]."""

    @property
    def conf(self) -> str: ...

    @property
    def cluster(self) -> str: ...


def slurm_of_site(scheduler: SchedulerSettings, *, cluster: str = "") -> Slurm:
    """Slurm's commands with the site's slurm.conf, for `cluster`, else for the one that the site names."""
    conf = scheduler.conf
    return Slurm(
        configuration=str(typed_path(conf)) if conf else "",
        cluster=cluster or scheduler.cluster,
        echo=prints_commands(),
        silences=silences_of_this_command(),
    )


SLOW_S = 2.0  # longer waits are reported
REMEMBERED_S = (
    5.0  # longer than one toolkit command needs between two queries; a command that waits for Slurm queries again
)
_PATTERNS = ("unable to contact slurm controller", "timed out", "did not answer", "did not respond")
# These query slurmctld, and toolkit can do without an answer; sbatch is always run.
_ASKING = ("squeue", "sinfo", "scontrol", "scancel")

# PATH, the configuration and the cluster: they decide which slurmctld a command queries.
Controller = tuple[str, str, str]


class Silences:
    """The slurmctlds that recently did not respond to one toolkit command."""

    def __init__(self) -> None:
        self._silent: dict[Controller, tuple[float, SchedulerRefusedError]] = {}
        self._reported_at = float("-inf")

    @contextmanager
    def report_when_slow(self, command: str, timeout_s: float) -> Iterator[None]:
        """Report on stderr after `SLOW_S` that a command is waiting for Slurm, and for how long it may."""
        timer = threading.Timer(SLOW_S, self._tell, [command, timeout_s])
        timer.daemon = True
        if timeout_s > 2 * SLOW_S:  # a shorter wait is not worth a message
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell(self, command: str, timeout_s: float) -> None:
        if time.monotonic() - self._reported_at >= SLOW_S:  # several queries at a time are one message
            self._reported_at = time.monotonic()
            say(f"Slurm has not responded to {command} yet; waiting up to {timeout_s:.0f} s")

    def of(self, controller: Controller, argv: Sequence[str]) -> SchedulerRefusedError | None:
        """The recent failure of a slurmctld that a command would query again; None otherwise."""
        when, error = self._silent.get(controller, (float("-inf"), None))
        return copy.copy(error) if argv[0] in _ASKING and time.monotonic() - when < REMEMBERED_S else None

    def remember(self, controller: Controller, argv: Sequence[str], error: SchedulerRefusedError) -> None:
        """Record a failure if slurmctld did not respond; an error message is a response."""
        if argv[0] in _ASKING and any(pattern in error.message.lower() for pattern in _PATTERNS):
            self._silent[controller] = (time.monotonic(), error)


_OF_THIS_COMMAND: ContextVar[Silences | None] = ContextVar("silences of this command", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Inside, the queries of one toolkit command share their record; programs that call toolkit's functions have none."""
    before = _OF_THIS_COMMAND.set(Silences())
    try:
        yield
    finally:
        _OF_THIS_COMMAND.reset(before)


_PRINTS_COMMANDS: ContextVar[bool] = ContextVar("--print-cmd was given", default=False)


@contextmanager
def printed_commands() -> Iterator[None]:
    """Inside, each Slurm command is printed on stderr before it runs."""
    before = _PRINTS_COMMANDS.set(True)
    try:
        yield
    finally:
        _PRINTS_COMMANDS.reset(before)


def prints_commands() -> bool:
    """Whether the current toolkit command prints the Slurm commands that it runs."""
    return _PRINTS_COMMANDS.get()


def silences_of_this_command() -> Silences | None:
    """The record of the current command; None outside of one."""
    return _OF_THIS_COMMAND.get()
