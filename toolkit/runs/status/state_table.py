"""Determine the state of a run from one table: its own record first, then Slurm, then the process table of its host.

The first row that applies wins. A test checks each row.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from toolkit.errors import ToolkitError
from toolkit.metrics.run_metrics import metrics_as_json
from toolkit.metrics.validation import ValidationRecord
from toolkit.metrics.validation import in_words as validation_in_words
from toolkit.rundir.attempt_records import reason_of
from toolkit.rundir.claims import StartClaim
from toolkit.rundir.run_files import FolderFiles, RunFiles
from toolkit.rundir.states import Next, RunState
from toolkit.rundir.sweep import Values, in_words
from toolkit.slurm.commands import Answer
from toolkit.slurm.job_facts import JobFacts, base_state, run_state
from toolkit.slurm.reasons import CanStart, pending_reason
from toolkit.slurm.records import named, with_cluster_option

__all__ = [
    "RECORD_SOURCE", "STATES", "SUPERVISOR_LOST", "HostFacts", "RunStatus", "Situation", "StateReport", "TaskStatus",
    "recorded_state", "report_state", "state_phrase", "summarize_tasks",
]  # fmt: skip

RECORD_SOURCE = "exit.json"  # the source of a state that the last attempt recorded
SUPERVISOR_LOST = "supervisor lost"

# The predicate of a sentence such as "run X timed out"; for other states it is "is" with the state.
_PHRASES = {
    RunState.CREATED: "was rendered but not submitted", RunState.CANCELLING: "is being cancelled",
    RunState.COMPLETED: "has completed", RunState.FAILED: "failed", RunState.CANCELLED: "was cancelled",
    RunState.STOPPED: "was stopped", RunState.TIMEOUT: "timed out", RunState.PREEMPTED: "was preempted",
    RunState.LOST: "was lost", RunState.UNKNOWN: "is in an unknown state",
}  # fmt: skip


def state_phrase(state: RunState) -> str:
    """Return a state as the predicate of a sentence about a run, such as "was cancelled"."""
    return _PHRASES.get(state, f"is {state.value}")


class StateReport(NamedTuple):
    """A state, its reason and its source. If `cannot_start`, the job waits until the job or the cluster is changed."""

    state: RunState
    reason: str
    source: str
    cannot_start: bool = False


class HostFacts(NamedTuple):
    """What this host knows about a run: the name of the host, whether the supervisor process exists here (None if
    unknown), and why the file system of the run is full ("" if it is not).
    """

    name: str = ""
    is_alive: bool | None = None
    full_disk: str = ""


@dataclass(frozen=True)
class Situation:
    """All facts that the state of a run, or of one task, depends on.

    `open_submission` describes a submission without a known job; if `is_absent`, Slurm certainly has no such job.
    """

    files: RunFiles
    folder: FolderFiles
    job_id: str
    answer: Answer
    host: HostFacts = field(default_factory=HostFacts)
    open_submission: str = ""
    is_absent: bool = False

    @property
    def is_local(self) -> bool:
        return self.job_id.startswith("local-")

    @property
    def is_silent(self) -> bool:
        return isinstance(self.answer, ToolkitError)

    @cached_property
    def fact(self) -> JobFacts | None:
        return None if isinstance(self.answer, ToolkitError) else self.answer.get(self.job_id)

    @cached_property
    def _claims(self) -> list[tuple[StartClaim, bool]]:
        return self.folder.claims_of(self.job_id)

    @property
    def claim(self) -> StartClaim | None:
        """The newest claim of a start by this job."""
        return self._claims[0][0] if self._claims else None

    @property
    def open_claim(self) -> StartClaim | None:
        """The newest claim of a start by this job, if that start has not ended; else None."""
        return None if not self._claims or self._claims[0][1] else self._claims[0][0]

    @cached_property
    def is_cancelling(self) -> bool:
        return self.files.is_cancel_asked(self.folder)

    @property
    def slurm_state(self) -> RunState:
        return run_state(self.fact.state) if self.fact is not None else RunState.UNKNOWN

    @property
    def is_outdated(self) -> bool:
        """True if Slurm reports the job as pending although its supervisor has started: the answer is outdated."""
        is_open = self.slurm_state is RunState.PENDING and self.open_claim is not None
        return is_open and self._is_claimed_by_this_life

    @property
    def is_requeued(self) -> bool:
        """True if the ranks have exited for a requeue; Slurm reports the job as running until its nodes are free."""
        attempt, claim = self.folder.attempt, self.claim
        if self.fact is None or claim is None or (self.slurm_state is not RunState.RUNNING and not self.is_outdated):
            return False
        if attempt is None or attempt.end is None or attempt.begun is None or attempt.begun.start != claim.start:
            return False
        is_this_life = base_state(self.fact.state) == "COMPLETING" or self._is_claimed_by_this_life
        return is_this_life and attempt.end.next in (Next.REQUEUE, Next.AWAIT)

    @property
    def _is_claimed_by_this_life(self) -> bool:
        """True if a start was claimed since Slurm's last restart of the job; its first start is restart 0."""
        return self.fact is not None and len(self._claims) > (self.fact.restarts or 0)

    @property
    def is_final(self) -> bool:
        return self.slurm_state.final and not self.is_requeued

    @property
    def slurm_reason(self) -> str:
        """What the run's own files add, followed by Slurm's state and reason."""
        assert self.fact is not None  # earlier rows handle jobs without facts
        reason = explain_facts(self.fact)
        if self.is_outdated and self.open_claim is not None:
            reason = f"start {self.open_claim.start} has begun on {self.open_claim.host}; {reason}"
        if self.is_requeued and self.claim is not None:
            reason = f"start {self.claim.start} has ended, and the job is being requeued; {reason}"
        return reason

    @property
    def lost_suffix(self) -> str:
        return f"; {SUPERVISOR_LOST}: it exited without recording a result" if self.open_claim is not None else ""

    @property
    def gone_process(self) -> str:
        full = f"; the run's file system is full ({self.host.full_disk})" if self.host.full_disk else ""
        pid = self.claim.pid if self.claim is not None else 0
        return f"{SUPERVISOR_LOST}: process {pid} is gone and left no result{full}"

    @property
    def started_on(self) -> str:
        """The host of a local run: the one that claimed its start, else the one that submitted it."""
        return self.claim.host if self.claim is not None else self.files.host


def recorded_state(folder: FolderFiles) -> StateReport | None:
    """Return the state that the last attempt recorded; None if it is not final, or a later start was submitted."""
    attempt, end = folder.attempt, folder.final_end
    if attempt is None or end is None:
        return None
    return StateReport(end.state, end.blaming(reason_of(attempt.directory, end)), RECORD_SOURCE)


class Row(NamedTuple):
    """If `applies`, the run has `state`; None means the state in the record or Slurm. Source "" is Slurm's answer."""

    when: str
    applies: Callable[[Situation], bool]
    state: RunState | None
    reason: Callable[[Situation], str]
    source: str = ""


STATES: tuple[Row, ...] = (
    Row("sbatch has not responded, and the job cannot be found yet", lambda s: bool(s.open_submission) and not s.is_absent,
        RunState.UNKNOWN, lambda s: s.open_submission, "none"),
    Row("the only submission failed", lambda s: bool(s.open_submission) and not s.job_id,
        RunState.LOST, lambda s: f"{s.open_submission}; `toolkit resume` submits the run", "Slurm"),
    Row("the last attempt recorded a final end", lambda s: s.folder.final_end is not None,
        None, lambda s: "", RECORD_SOURCE),
    Row("no job", lambda s: not s.job_id,
        RunState.CREATED, lambda s: "rendered, not submitted", "run directory"),
    # The next rows are for a local run. Only its own host knows whether it is running.
    Row("local, on another host", lambda s: s.is_local and s.started_on != s.host.name,
        RunState.UNKNOWN, lambda s: f"it was started on {s.started_on}; only that host knows its state", "run directory"),
    Row("local, no start claimed, cancelled", lambda s: s.is_local and s.claim is None and bool(s.host.is_alive) and s.is_cancelling,
        RunState.CANCELLING, lambda s: "the supervisor is starting", "process table"),
    Row("local, no start claimed", lambda s: s.is_local and s.claim is None and bool(s.host.is_alive),
        RunState.PENDING, lambda s: "the supervisor is starting", "process table"),
    Row("local, exited before a start was claimed", lambda s: s.is_local and s.claim is None,
        RunState.FAILED, lambda s: "the supervisor exited before it claimed the start; see the run's slurm-local-*.out", "process table"),
    Row("local, supervisor exited", lambda s: s.is_local and not s.host.is_alive,
        RunState.LOST, lambda s: s.gone_process, "process table"),
    Row("local, cancelled", lambda s: s.is_local and s.is_cancelling,
        RunState.CANCELLING, lambda s: "a cancel was requested", "process table"),
    Row("local", lambda s: s.is_local and s.claim is not None,
        RunState.RUNNING, lambda s: f"process {s.claim.pid} on {s.claim.host}" if s.claim is not None else "", "process table"),
    Row("a job id of Slurm on a site without Slurm", lambda s: not s.files.job.uses_slurm,
        RunState.UNKNOWN, lambda s: f"job {s.job_id} does not belong to site {s.files.job.site}", "run directory"),
    # The next rows are for a Slurm job. If only Slurm reports it as completed, without a record of the run, it is lost.
    Row("Slurm does not respond", lambda s: s.is_silent,
        RunState.UNKNOWN, lambda s: f"Slurm does not respond: {getattr(s.answer, 'message', '')}", "none"),
    Row("unknown to Slurm, cancelled before its first start", lambda s: s.fact is None and s.is_cancelling and s.claim is None,
        RunState.CANCELLED, lambda s: f"job {s.job_id} was cancelled before it started", "run directory"),
    Row("unknown to Slurm", lambda s: s.fact is None,
        RunState.LOST, lambda s: f"Slurm no longer knows job {s.job_id}, and the run left no result{s.lost_suffix}", "Slurm"),
    # `toolkit run` inside salloc: the allocation continues after its supervisor.
    Row("running, supervisor exited", lambda s: s.slurm_state is RunState.RUNNING and s.open_claim is not None and s.host.is_alive is False,
        RunState.LOST, lambda s: f"{s.gone_process}; {s.slurm_reason}", "process table"),
    Row("in the queue or running, cancelled", lambda s: s.is_cancelling and not s.is_final,
        RunState.CANCELLING, lambda s: s.slurm_reason),
    Row("running, ranks exited for a requeue", lambda s: s.is_requeued,
        RunState.PENDING, lambda s: s.slurm_reason),
    Row("pending, but its start was claimed", lambda s: s.is_outdated,
        RunState.RUNNING, lambda s: s.slurm_reason),
    Row("completed", lambda s: s.slurm_state is RunState.COMPLETED,
        RunState.LOST, lambda s: f"{s.slurm_reason}, but the run left no result{s.lost_suffix}"),
    Row("failed, cancelled, timeout or preempted", lambda s: s.is_final,
        None, lambda s: s.slurm_reason + s.lost_suffix),
    Row("in the queue or running", lambda s: True,
        None, lambda s: s.slurm_reason),
)  # fmt: skip


def report_state(situation: Situation) -> StateReport:
    """Return the state of the first row that applies, with its reason and source."""
    row, fact = next(row for row in STATES if row.applies(situation)), situation.fact
    if row.source == RECORD_SOURCE and (recorded := recorded_state(situation.folder)) is not None:
        return recorded
    state = situation.slurm_state if row.state is None else row.state
    is_stuck = not row.source and state is RunState.PENDING and fact is not None and _never_starts(fact)
    source = row.source or (fact.source if fact is not None else "none")
    return StateReport(state, row.reason(situation), source, is_stuck)


def explain_facts(fact: JobFacts) -> str:
    """Return `Slurm: PENDING (Priority)`, with the reason why a requeued or held job waits."""
    if not fact.state:
        return fact.reason
    explanation = f"Slurm: {fact.state}" + (f" ({fact.reason})" if fact.reason else "")
    if run_state(fact.state) is not RunState.PENDING:
        return explanation  # its times and its reason are from the last time it was pending
    begin = fact.eligible_time or fact.start_time
    if fact.reason == "BeginTime" and begin:
        if not fact.restarts:
            return f"{explanation}: not before {begin}"
        times = "once" if fact.restarts == 1 else f"{fact.restarts} times"
        return f"{explanation}: requeued {times}, and Slurm delays a requeued job until {begin}"
    if fact.reason == "JobHeldAdmin":
        return f"{explanation}: held until an administrator releases it"
    if base_state(fact.state) in ("REQUEUE_HOLD", "SPECIAL_EXIT") or fact.reason.startswith("JobHeld"):
        release = with_cluster_option(f"`scontrol release {fact.job_id}`", fact.cluster)
        return f"{explanation}: held until {release}"
    if fact.start_time:
        return f"{explanation}, expected to start at {fact.start_time}"
    return explanation


def _never_starts(fact: JobFacts) -> bool:
    known = pending_reason(fact.reason or "None", names_nodes=bool(fact.required_nodes))
    return known.can_start is CanStart.NEVER


# The state of an array is the first of these that a task is in.
_ORDER = (
    RunState.CANCELLING, RunState.RUNNING, RunState.PENDING, RunState.UNKNOWN, RunState.FAILED, RunState.LOST,
    RunState.TIMEOUT, RunState.PREEMPTED, RunState.CANCELLED, RunState.STOPPED, RunState.COMPLETED,
)  # fmt: skip


@dataclass(frozen=True)
class TaskStatus:
    """One task of an array run. `job_id` is Slurm's, `123_4`; `source` and `cannot_start` are as in `StateReport`."""

    task: int
    job_id: str
    state: RunState
    reason: str
    source: str
    exit_code: int | None
    cannot_start: bool = False
    values: Values | None = None  # the swept values

    @property
    def named(self) -> str:
        """The task in words: `task 3`, or `task 3 (train.lr=0.0003)` in a sweep."""
        return f"task {self.task} ({in_words(self.values)})" if self.values else f"task {self.task}"

    def as_json(self) -> dict[str, Any]:
        """Return the task as an entry of `tasks` in `status --json`."""
        return {
            "task": self.task, "job_id": self.job_id, "state": self.state.value, "reason": self.reason,
            "exit_code": self.exit_code, "values": None if self.values is None else dict(self.values),
        }  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """The status of a run; `source` is where `state` and `reason` come from."""

    run_id: str
    job_name: str
    state: RunState
    site: str
    job_id: str
    reason: str
    source: str
    nodes: int | str
    ranks: int
    starts: int
    attempts: int
    step: int | None
    exit_code: int | None
    path: str
    tasks: tuple[TaskStatus, ...] | None = None  # None unless it is an array run
    cannot_start: bool = False  # as in `StateReport`; for an array, true if no unfinished task can start
    values: Values | None = None  # the swept values if this is a task of a sweep
    validation: ValidationRecord | None = None  # the last validation at or before `step`
    cluster: str = ""  # "" for the site's own
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest value of each metric

    @property
    def full_job_id(self) -> str:
        """The job id as a user types it, with the cluster if it is not the site's own."""
        return named(self.job_id, self.cluster)

    @property
    def validated(self) -> str:
        """The last validation in words, with the reason if it ended the run; "" before the first."""
        last = self.validation
        if last is None:
            return ""
        stopped = f"; stopped early: {last.stopped}" if self.stopped_early else ""
        return f"validated at step {last.step}: {validation_in_words(last.means)}{stopped}"

    @property
    def stopped_early(self) -> bool:
        """Whether the run's last validation ended it."""
        last = self.validation
        if last is None or self.state is not RunState.COMPLETED:
            return False
        return bool(last.stopped) and last.step == self.step

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `status --json`."""
        tasks = None if self.tasks is None else [task.as_json() for task in self.tasks]
        validation = None if self.validation is None else self.validation.as_json()
        without = replace(self, tasks=None, validation=None)  # both have their own `as_json`
        value = {**asdict(without), "state": self.state.value, "tasks": tasks, "validation": validation}
        value |= metrics_as_json(self.metrics)
        del value["cannot_start"]  # only `explain --json` contains it, with the reason
        return value


def summarize_tasks(tasks: Sequence[TaskStatus]) -> tuple[RunState, str, int | None]:
    """Return the state of an array, `3 running, 6 pending`, and the exit code of the first task in that state."""
    counts = Counter(task.state for task in tasks)
    state = next((state for state in _ORDER if counts[state]), RunState.UNKNOWN)
    code = next((task.exit_code for task in tasks if task.state is state and task.exit_code is not None), None)
    return state, ", ".join(f"{counts[one]} {one.value}" for one in _ORDER if counts[one]), code
