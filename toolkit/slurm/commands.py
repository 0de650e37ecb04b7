"""Calls of Slurm's commands: explicit formats, a cleaned environment, a time-out, and readable errors.

A user's SQUEUE_FORMAT or SLURM_TIME_FORMAT would change what the commands print; they are removed for every call.
SBATCH_* would override the script: those that correspond to a key are in the script already, the others must not apply.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError
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
from toolkit.slurm.records import UnreadableError, new_mark
from toolkit.slurm.refusals import refusal_of
from toolkit.slurm.silence import Controller, Silences
from toolkit.talk import plain

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
    """A Slurm command ended without an answer; Slurm may have carried out the request."""


class TimedOutError(NoAnswerError):
    """A Slurm command exceeded its time-out."""


class UnknownClusterError(SchedulerRefusedError):
    """The named cluster is not in accounting, or is down."""


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands for the users of one cluster.

    `configuration` is a slurm.conf, "" for the default; `cluster` is another cluster of the same accounting to use,
    "" for the configuration's own.
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
        """Run one command and return its stdout. `base` is its environment, by default that of this process.

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
                fix=in_words("`scontrol ping` shows whether Slurm is up", self.cluster),
            ) from error
        if done.returncode:
            if self.cluster and has_no_address(done.stderr):
                raise self.unknown_cluster(refusal_of(done.stderr)[0])
            refused = _failure(argv[0], done)
            refused.fix = in_words(refused.fix, self.cluster)
            raise refused
        return done.stdout

    def begin(self, argv: Sequence[str], *, base: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
        """Start a command that outlives this terminal; its output goes to the descriptor `output`, which is closed here.

        Raises:
            NotFoundError: the command is not on PATH.
        """
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

        Jobs that neither knows are omitted. If squeue does not respond, or its output cannot be parsed, only ends from
        accounting count as facts; the other jobs have no state, but the reason why.

        Raises:
            SchedulerRefusedError: nothing is known, because squeue did not respond.
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
        """Put a running batch job back into the queue, under the same job id; for an array, its running tasks.

        Finished tasks stay finished, without an error: plain `scontrol requeue` would run them again.
        """
        self.call(["scontrol", "requeue", "Incomplete", job_id])


def _failure(command: str, done: subprocess.CompletedProcess[str]) -> SchedulerRefusedError:
    """The error for a command's exit code; a wrapping shell returns 128 plus the signal's number.

    255 is sbatch's own for an invalid option, and ssh's for a lost connection: the message decides which.
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


# Slurm's commands with an option --clusters.
_WITH_CLUSTER = ("sbatch", "salloc", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_COMMAND = re.compile(rf"`({'|'.join(_WITH_CLUSTER)}) ")
# What they print for a cluster without an address, in 22.05 to 24.11.
_NO_ADDRESS = re.compile(
    r"can't be reached now, or it is an invalid entry for --cluster|problem talking to the database"
)


def for_cluster(argv: Sequence[str], cluster: str) -> list[str]:
    """A Slurm command with the option for another cluster; any other command unchanged."""
    option = [f"--clusters={cluster}"] if cluster and argv[0] in _WITH_CLUSTER else []
    return [argv[0], *option, *argv[1:]]


def in_words(text: str, cluster: str) -> str:
    """A message in which each Slurm command has the option for another cluster."""
    return _COMMAND.sub(rf"`\1 -M {cluster} ", text) if cluster else text


def named(job_id: str, cluster: str) -> str:
    """A job id in sbatch's form for another cluster, `123;cluster`."""
    return f"{job_id};{cluster}" if job_id and cluster else job_id


def has_no_address(output: str) -> bool:
    """True if a command failed because accounting has no address of the cluster."""
    return _NO_ADDRESS.search(output) is not None


def cluster_of_allocation(environ: Mapping[str, str]) -> str:
    """The cluster of this process's allocation, if Slurm's commands here use another one by default.

    This is the case in the shell of a `salloc -M`, which runs on the login node; on a node of the allocation they use its own.
    """
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ:
        return ""
    return environ.get("SLURM_WORKING_CLUSTER", "").partition(":")[0] or environ.get("SLURM_CLUSTERS", "")
