"""Cause the failures of a rehearsal, each as close to the real one as a user's permissions allow.

Each is a context manager: entering it causes the failure, leaving it undoes changes that must not outlast it.
"""

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from toolkit.errors import CheckFailedError, SchedulerRefusedError, ToolkitError, counted
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import read_json
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import ENDINGS, Cause
from toolkit.runs.record.job import is_interactive, recorded_job, slurm_of
from toolkit.runs.rehearse.rehearse import Inject, Injected
from toolkit.slurm.commands import Slurm
from toolkit.supervise.ending import earlier_ends
from toolkit.supervise.rank_files import begun_ranks
from toolkit.supervise.supervisor import WALLTIME_SLACK_S

__all__ = ["CutOff", "choose"]

KINDS = ("preempt", "walltime", "kill-rank", "kill-node")
_CAUSES = {
    "preempt": Cause.PREEMPTED, "walltime": Cause.WALLTIME, "kill-rank": Cause.CRASHED, "kill-node": Cause.CRASHED,
}  # fmt: skip
_PERIOD_S = 1.0
# A rank is the child of its guard, whose pid is in the run directory. Nothing else is ever killed.
_KILL = 'grep -q toolkit.rank /proc/$1/cmdline && kill -KILL $(cat /proc/$1/task/$1/children)'  # fmt: skip

# Disconnects a node and reconnects it at the end; only the dev cluster can.
CutOff = Callable[[str], AbstractContextManager[Injected]]


def choose(run: RunDirectory, attempt: AttemptDirectory, kind: str, rank: int | None, cut_off: CutOff | None) -> Inject:
    """Return the failure of the given kind for this run.

    Raises:
        CheckFailedError: it would end the run, or cannot be caused here.
    """
    job = recorded_job(run)
    if kind != "kill-rank" and is_interactive(run):
        raise CheckFailedError(
            f"run {run.run_id} runs in an allocation, which Slurm does not start again: {kind} would end it",
            fix="rehearse kill-rank N, or submit the job with `toolkit submit`",
        )
    job_id = job_ids(run)[-1]
    slurm = None if job_id.startswith("local-") else slurm_of(job)
    # Slurm reports a disconnected node as lost; if only the ranks of the node die, the cause is a crash.
    cause = Cause.NODE_LOST if kind == "kill-node" and cut_off is not None else _CAUSES[kind]
    _require_a_next_start(run, attempt, kind, cause)
    if kind == "kill-rank":
        return _rank(attempt, _known_rank(attempt, rank), slurm, job_id)
    if slurm is None:
        raise CheckFailedError(
            f"run {run.run_id} has no scheduler, which {kind} needs",
            fix="rehearse kill-rank N, or submit the job to a cluster",
        )
    if kind == "kill-node":
        host = _last_host(attempt)
        return (lambda: cut_off(host)) if cut_off is not None else _ranks_of(attempt, host, slurm, job_id)
    if kind == "walltime":
        return _walltime(slurm, job_id, job.restart.warn_s)
    return _preempt(slurm, job_id)


def _require_a_next_start(run: RunDirectory, attempt: AttemptDirectory, kind: str, cause: Cause) -> None:
    """Reject a rehearsal that would end a run whose budget is spent, as the supervisor counts it."""
    job = recorded_job(run)
    budget = ENDINGS[cause].budget
    limit = int(getattr(job.restart, budget))
    started = StartRecord.read(attempt)
    ends = earlier_ends(run, started.start if started is not None else 0)
    spent = sum(ENDINGS[end.cause].budget == budget for end in ends)
    if 0 <= limit <= spent:
        raise CheckFailedError(
            f"restart.{budget} = {limit} is spent ({spent} so far): {kind} would end this run",
            fix=f"submit the job with --set restart.{budget}={spent + 1} or more",
        )
    if cause is not Cause.CRASHED and not job.job.requeue:
        raise CheckFailedError(
            f"this run may not be requeued: {kind} would end it", fix="submit the job with job.requeue = true"
        )


def _known_rank(attempt: AttemptDirectory, rank: int | None) -> int:
    ranks = begun_ranks(attempt)
    if rank is None or rank not in ranks:
        raise ToolkitError(
            "kill-rank needs a rank number" if rank is None else f"no rank {rank}",
            where=str(attempt.ranks), fix=f"choose one of {ranks[0]} to {ranks[-1]}: kill-rank {ranks[-1]}",
        )  # fmt: skip
    return rank


def _last_host(attempt: AttemptDirectory) -> str:
    """Return the host of the last rank, which with several hosts is not the supervisor's."""
    ranks = sorted(attempt.ranks.glob("rank-*.json"))
    return str(read_json(ranks[-1])["host"])


def _rank(attempt: AttemptDirectory, rank: int, slurm: Slurm | None, job_id: str) -> Inject:
    known = read_json(attempt.rank_file(rank))

    @contextmanager
    def inject() -> Iterator[Injected]:
        if slurm is None:
            _kill_here(known["host"], known["pid"])
        else:
            _kill_there(slurm, job_id, known["host"], known["pid"])
        yield Injected(f"sent KILL to rank {rank} on {known['host']}")

    return inject


def _ranks_of(attempt: AttemptDirectory, host: str, slurm: Slurm, job_id: str) -> Inject:
    """Kill all ranks of a node at once if the node cannot be disconnected; it keeps running."""
    here = [known for path in sorted(attempt.ranks.glob("rank-*.json")) if (known := read_json(path))["host"] == host]

    @contextmanager
    def inject() -> Iterator[Injected]:
        for known in here:
            _kill_there(slurm, job_id, host, known["pid"])
        yield Injected(
            f"sent KILL to {counted(len(here), 'rank')} on {host}; the node keeps running, so Slurm reports no failure"
        )

    return inject


def _kill_here(host: str, guard: int) -> None:
    if host != socket.gethostname():
        raise CheckFailedError(f"the rank runs on {host}", fix=f"run the command there, not on {socket.gethostname()}")
    gone = CheckFailedError(f"process {guard} is no longer a rank", fix="check `toolkit status`, and retry")
    try:
        if b"toolkit.rank" not in Path(f"/proc/{guard}/cmdline").read_bytes():
            raise gone
        for child in Path(f"/proc/{guard}/task/{guard}/children").read_text(encoding="utf-8").split():
            os.kill(int(child), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):  # the guard or its rank has just exited
        raise gone from None


def _kill_there(slurm: Slurm, job_id: str, host: str, guard: int) -> None:
    # srun does not accept `42_0`, only the job number from squeue.
    number = slurm.call(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"]).strip()
    slurm.call(
        ["srun", f"--jobid={number}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--mpi=none",
         "--gres=none", "--quiet", "--input=none", "sh", "-c", _KILL, "sh", str(guard)]
    )  # fmt: skip


def _preempt(slurm: Slurm, job_id: str) -> Inject:
    """`scontrol requeue`: TERM to all processes, KILL after KillWait, requeue; like a preemption without grace time."""

    @contextmanager
    def inject() -> Iterator[Injected]:
        slurm.requeue(job_id)
        yield Injected(f"requested a requeue of job {job_id} from Slurm, as after a preemption")

    return inject


def _walltime(slurm: Slurm, job_id: str, warn_s: int) -> Inject:
    """Make Slurm send its own warning: lower the time limit so that the job ends shortly after it."""

    @contextmanager
    def inject() -> Iterator[Injected]:
        limit, began, end = _limits(slurm, job_id)
        if end - time.time() <= warn_s + WALLTIME_SLACK_S:
            slurm.call(["scancel", "--signal=USR2", "--batch", job_id])
            yield Injected(f"sent USR2 to the supervisor, as Slurm does {warn_s} s before the walltime")
            return
        minutes = math.ceil((time.time() - began + warn_s + 60) / 60)
        slurm.call(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}"])
        lowered = _LoweredLimit(slurm, job_id, limit)
        soon = f"Slurm warns within {WALLTIME_SLACK_S:.0f} s"
        done = f"lowered the time limit of job {job_id} from {limit} to {minutes} min; {soon}"
        try:
            yield Injected(done, lowered.give_back)
        finally:
            lowered.require_given_back()

    return inject


def _limits(slurm: Slurm, job_id: str) -> tuple[str, float, float]:
    """Return the limit in Slurm's format, the start and the end in seconds since the epoch."""
    fact = slurm.jobs([job_id]).get(job_id)
    if fact is None or not (fact.start_time and fact.end_time):
        raise CheckFailedError(f"Slurm does not report when job {job_id} ends", fix="check `toolkit status`, and retry")
    if fact.time_limit == "UNLIMITED":
        raise CheckFailedError(f"job {job_id} has no time limit", fix="rehearse preempt, or submit the job with -t")
    began, end = (datetime.fromisoformat(moment).timestamp() for moment in (fact.start_time, fact.end_time))
    return fact.time_limit, began, end


@dataclass
class _LoweredLimit:
    """The old time limit of a job, restored while the job waits: only operators may raise it for a running one."""

    slurm: Slurm
    job_id: str
    limit: str
    refused: str = "it has not waited in the queue since"
    _given_back: bool = False
    _tried_at: float = float("-inf")

    def give_back(self) -> bool:
        """Try to restore it, at most once a second; True if Slurm accepted, or the job is over."""
        if self._given_back or time.monotonic() - self._tried_at < _PERIOD_S:
            return self._given_back
        self._tried_at = time.monotonic()
        try:
            self.slurm.call(["scontrol", "update", f"JobId={self.job_id}", f"TimeLimit={self.limit}"])
            self._given_back = True
        except SchedulerRefusedError as error:
            self.refused = error.message
            self._given_back = "already finished" in error.message or "Invalid job id" in error.message
        return self._given_back

    def require_given_back(self) -> None:
        """Try a last time.

        Raises:
            SchedulerRefusedError: Slurm refused; the fix names the command.
        """
        self._tried_at = float("-inf")
        if not self.give_back():
            raise SchedulerRefusedError(
                f"job {self.job_id} still has the lowered time limit: {self.refused}",
                fix=f"`scontrol update JobId={self.job_id} TimeLimit={self.limit}` while it waits in the queue",
            )
