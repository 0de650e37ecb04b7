"""The state of a run without a word of its own: what Slurm says of its job, or this host's process table."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from toolkit.errors import ToolkitError
from toolkit.rundir.claims import StartClaim, read_claim
from toolkit.rundir.disk_space import why_full
from toolkit.rundir.files import read_json, read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import Next, RunState
from toolkit.rundir.task_files import read_begun
from toolkit.slurm.clusters import in_words
from toolkit.slurm.job_facts import JobFacts
from toolkit.slurm.reasons import CanStart, pending_reason
from toolkit.slurm.states import base_state, run_state
from toolkit.supervise.allocation import process_start_ticks

# Slurm's facts by each job id that it was asked for, None of a job that it does not know; or the error where it did not
# answer. An id that is not there was not asked for.
Answer = Mapping[str, JobFacts | None] | ToolkitError
RECORD_SOURCE = "exit.json"  # who said it, where the run's own last attempt did
SUPERVISOR_LOST = "supervisor lost"


class StateReport(NamedTuple):
    """A state, the reason in words, and who said it; `cannot_start`: not until somebody changes the job or the cluster."""

    state: RunState
    reason: str
    source: str
    cannot_start: bool = False


def state_from_slurm(run: RunDirectory, job_id: str, answer: Answer) -> StateReport:
    """The state that Slurm gives a run or a task. Its exit code 0 is no done marker, so a completed job alone is lost."""
    if isinstance(answer, ToolkitError):
        return StateReport(RunState.UNKNOWN, f"Slurm does not answer: {answer.message}", "none")
    claim = _claim_of(run, job_id)
    open_claim = claim if claim is not None and not _has_ended(run, claim) else None
    lost = f"; {SUPERVISOR_LOST}: it ended without a word" if open_claim else ""
    fact = answer.get(job_id)
    cancelling = run.is_asked("cancel")
    if fact is None and cancelling and claim is None:
        return StateReport(RunState.CANCELLED, f"job {job_id} was cancelled before it began", "run directory")
    if fact is None:
        gone = f"Slurm does not know job {job_id} any more, and the run left no result"
        return StateReport(RunState.LOST, gone + lost, "Slurm")
    state, reason = run_state(fact.state), _in_words(fact)
    if state is RunState.RUNNING and open_claim is not None and _vanished(open_claim):
        # `toolkit run` inside salloc: the allocation lives on, its supervisor does not.
        return StateReport(RunState.LOST, f"{_gone(run, open_claim)}; {reason}", "process table")
    if state is RunState.PENDING and open_claim is not None and _lives(run, job_id) > (fact.restarts or 0):
        # This life of the job has a supervisor already: Slurm's answer is the older one.
        state, reason = RunState.RUNNING, f"start {open_claim.start} has begun on {open_claim.host}; {reason}"
    if state is RunState.RUNNING and claim is not None and _goes_back(run, claim, fact):
        state, reason = RunState.PENDING, f"start {claim.start} has ended, and the job is being requeued; {reason}"
    if cancelling and not state.final:
        return StateReport(RunState.CANCELLING, reason, fact.source)
    if state is RunState.COMPLETED:
        return StateReport(RunState.LOST, reason + ", but the run left no result" + lost, fact.source)
    never = state is RunState.PENDING and _never_starts(fact)
    return StateReport(state, reason + (lost if state.final else ""), fact.source, never)


def _in_words(fact: JobFacts) -> str:
    """`Slurm: PENDING (Priority)`, and why a requeued or held job waits."""
    if not fact.state:
        return fact.reason
    said = f"Slurm: {fact.state}" + (f" ({fact.reason})" if fact.reason else "")
    if run_state(fact.state) is not RunState.PENDING:
        return said  # the times and the reason are those of its last wait
    begin = fact.eligible_time or fact.start_time
    if fact.reason == "BeginTime" and begin:
        if not fact.restarts:
            return f"{said}: not before {begin}"
        return f"{said}: requeued {_times(fact.restarts)}, and Slurm holds a requeued job back until {begin}"
    if fact.reason == "JobHeldAdmin":
        return f"{said}: held until an administrator releases it"
    if base_state(fact.state) in ("REQUEUE_HOLD", "SPECIAL_EXIT") or fact.reason.startswith("JobHeld"):
        release = in_words(f"`scontrol release {fact.job_id}`", fact.cluster)
        return f"{said}: held until {release}"
    if fact.start_time:
        return f"{said}, expected to start at {fact.start_time}"
    return said


def _never_starts(fact: JobFacts) -> bool:
    known = pending_reason(fact.reason or "None", names_nodes=bool(fact.required_nodes))
    return known.can_start is CanStart.NEVER


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def state_from_process_table(run: RunDirectory, job_id: str) -> StateReport:
    """Local runs have no scheduler to ask: only the host that they run on knows whether they live."""
    claim, host = _claim_of(run, job_id), started_on(run, job_id)
    if host != socket.gethostname():
        return StateReport(RunState.UNKNOWN, f"it was started on {host}; ask there", "run directory")
    cancelling = run.is_asked("cancel")
    if claim is None:
        if _alive(int(job_id.removeprefix("local-")), None):
            waiting = RunState.CANCELLING if cancelling else RunState.PENDING
            return StateReport(waiting, "the supervisor is starting", "process table")
        early = "the supervisor ended before it claimed the start; see the run's slurm-local-*.out"
        return StateReport(RunState.FAILED, early, "process table")
    if not _alive(claim.pid, claim.process_started):
        return StateReport(RunState.LOST, _gone(run, claim), "process table")
    if cancelling:
        return StateReport(RunState.CANCELLING, "cancel was asked", "process table")
    return StateReport(RunState.RUNNING, f"process {claim.pid} on {claim.host}", "process table")


def started_on(run: RunDirectory, job_id: str) -> str:
    """The host that a local run lives on: the one that claimed it, before that the one that submitted it."""
    claim = _claim_of(run, job_id)
    return claim.host if claim else str(read_json(run.record)["host"])


def _gone(run: RunDirectory, claim: StartClaim) -> str:
    full = f"; the run's file system is full ({left})" if (left := why_full(run.path)) else ""
    return f"{SUPERVISOR_LOST}: process {claim.pid} is gone and left no result{full}"


def _vanished(claim: StartClaim) -> bool:
    """The supervisor ran on this host and is gone."""
    return claim.host == socket.gethostname() and not _alive(claim.pid, claim.process_started)


def _has_ended(run: RunDirectory, claim: StartClaim) -> bool:
    return any((run.start(claim.start) / name).exists() for name in ("end.json", "lost.json"))


def _goes_back(run: RunDirectory, claim: StartClaim, fact: JobFacts) -> bool:
    """The ranks of the newest start have ended to be requeued; Slurm calls the job running until its nodes are free."""
    attempt = run.last_attempt()
    end = read_json_or_none(attempt.exit_file) if attempt is not None else None
    begun = read_begun(attempt) if attempt is not None else None
    if end is None or begun is None or begun["start"] != claim.start:
        return False
    is_this_life = base_state(fact.state) == "COMPLETING" or _lives(run, claim.job_id) > (fact.restarts or 0)
    return is_this_life and Next(end["next"]) in (Next.REQUEUE, Next.AWAIT)


def _claim_of(run: RunDirectory, job_id: str) -> StartClaim | None:
    return next(iter(_claims(run, job_id)), None)


def _lives(run: RunDirectory, job_id: str) -> int:
    """How many starts a job has had; Slurm's first life is restart 0."""
    return len(_claims(run, job_id))


def _claims(run: RunDirectory, job_id: str) -> list[StartClaim]:
    """A job's claims, the newest first; of jobs in turn those of all of them."""
    claims = (read_claim(run, number) for number in reversed(run.start_numbers()))
    return [claim for claim in claims if claim is not None and job_id in (claim.job_id, claim.job_id.partition("_")[0])]


def _alive(pid: int, started: int | None) -> bool:
    try:
        ticks = process_start_ticks(pid)
    except ProcessLookupError:
        return False
    return started is None or ticks == started
