"""The state of a run or of a task, as one table: its own record first, then Slurm, then the process table of its host.

The rows are in order: the first one that applies decides. A test checks each row.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from toolkit.errors import ToolkitError
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
    "recorded_state", "report_state", "summarize_tasks",
]  # fmt: skip

RECORD_SOURCE = "exit.json"  # of a state that the run's last attempt recorded
SUPERVISOR_LOST = "supervisor lost"


class StateReport(NamedTuple):
    """A state, the reason as a sentence, and its source. `cannot_start`: unless a user changes the job or the cluster."""

    state: RunState
    reason: str
    source: str
    cannot_start: bool = False


class HostFacts(NamedTuple):
    """What this host knows of a run: its own name, whether the supervisor's process exists here, None if it cannot tell,
    and why the run's file system is full, "" if it is not.
    """

    name: str = ""
    is_alive: bool | None = None
    full_disk: str = ""


@dataclass(frozen=True)
class Situation:
    """All that the state of one folder depends on: the run's, or that of one task.

    `open_submission` is the reason of a submission without a known job, `is_absent` whether Slurm certainly has none.
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
        """The job's newest claim of a start."""
        return self._claims[0][0] if self._claims else None

    @property
    def open_claim(self) -> StartClaim | None:
        """The same, of a start that has not ended."""
        return None if not self._claims or self._claims[0][1] else self._claims[0][0]

    @cached_property
    def is_cancelling(self) -> bool:
        return self.files.is_cancel_asked(self.folder)

    @property
    def slurm_state(self) -> RunState:
        return run_state(self.fact.state) if self.fact is not None else RunState.UNKNOWN

    @property
    def is_outdated(self) -> bool:
        """True if the supervisor of a job that Slurm calls pending has started: Slurm's answer is older than the claim."""
        is_open = self.slurm_state is RunState.PENDING and self.open_claim is not None
        return is_open and self._is_claimed_by_this_life

    @property
    def is_requeued(self) -> bool:
        """True if the ranks have exited to be requeued. Slurm calls the job running until its nodes are free."""
        attempt, claim = self.folder.attempt, self.claim
        if self.fact is None or claim is None or (self.slurm_state is not RunState.RUNNING and not self.is_outdated):
            return False
        if attempt is None or attempt.end is None or attempt.begun is None or attempt.begun.start != claim.start:
            return False
        is_this_life = base_state(self.fact.state) == "COMPLETING" or self._is_claimed_by_this_life
        return is_this_life and attempt.end.next in (Next.REQUEUE, Next.AWAIT)

    @property
    def _is_claimed_by_this_life(self) -> bool:
        """True if the job has had more starts than Slurm counts restarts; its first life is restart 0."""
        return self.fact is not None and len(self._claims) > (self.fact.restarts or 0)

    @property
    def is_final(self) -> bool:
        return self.slurm_state.final and not self.is_requeued

    @property
    def slurm_reason(self) -> str:
        """Slurm's state and reason as a sentence, after what the run's own files add."""
        assert self.fact is not None  # the rows that use it come after those without
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
        """The host of a local run: the one that claimed it, before that the one that submitted it."""
        return self.claim.host if self.claim is not None else self.files.host


def recorded_state(folder: FolderFiles) -> StateReport | None:
    """The state that the last attempt recorded; None if it recorded no final one, or a later start was submitted."""
    attempt, end = folder.attempt, folder.final_end
    if attempt is None or end is None:
        return None
    return StateReport(end.state, end.blaming(reason_of(attempt.directory, end)), RECORD_SOURCE)


class Row(NamedTuple):
    """One row: `state` holds if `applies`; None is the state of the record, or of Slurm. The source "" is Slurm's answer."""

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
    # A local run: only the host that it runs on can tell whether it does.
    Row("local, on another host", lambda s: s.is_local and s.started_on != s.host.name,
        RunState.UNKNOWN, lambda s: f"it was started on {s.started_on}; ask there", "run directory"),
    Row("local, no start claimed, cancelled", lambda s: s.is_local and s.claim is None and bool(s.host.is_alive) and s.is_cancelling,
        RunState.CANCELLING, lambda s: "the supervisor is starting", "process table"),
    Row("local, no start claimed", lambda s: s.is_local and s.claim is None and bool(s.host.is_alive),
        RunState.PENDING, lambda s: "the supervisor is starting", "process table"),
    Row("local, exited before a start was claimed", lambda s: s.is_local and s.claim is None,
        RunState.FAILED, lambda s: "the supervisor ended before it claimed the start; see the run's slurm-local-*.out", "process table"),
    Row("local, supervisor exited", lambda s: s.is_local and not s.host.is_alive,
        RunState.LOST, lambda s: s.gone_process, "process table"),
    Row("local, cancelled", lambda s: s.is_local and s.is_cancelling,
        RunState.CANCELLING, lambda s: "cancel was asked", "process table"),
    Row("local", lambda s: s.is_local and s.claim is not None,
        RunState.RUNNING, lambda s: f"process {s.claim.pid} on {s.claim.host}" if s.claim is not None else "", "process table"),
    Row("a job id of Slurm on a site without Slurm", lambda s: not s.files.job.uses_slurm,
        RunState.UNKNOWN, lambda s: f"job {s.job_id} is not of site {s.files.job.site}", "run directory"),
    # A job of Slurm. Its exit code 0 is not a done marker, so that a completed job alone is lost.
    Row("Slurm does not respond", lambda s: s.is_silent,
        RunState.UNKNOWN, lambda s: f"Slurm does not answer: {getattr(s.answer, 'message', '')}", "none"),
    Row("unknown to Slurm, cancelled before its first start", lambda s: s.fact is None and s.is_cancelling and s.claim is None,
        RunState.CANCELLED, lambda s: f"job {s.job_id} was cancelled before it began", "run directory"),
    Row("unknown to Slurm", lambda s: s.fact is None,
        RunState.LOST, lambda s: f"Slurm does not know job {s.job_id} any more, and the run left no result{s.lost_suffix}", "Slurm"),
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
    """The state that the first row which applies gives, with its reason and source."""
    row, fact = next(row for row in STATES if row.applies(situation)), situation.fact
    if row.source == RECORD_SOURCE and (recorded := recorded_state(situation.folder)) is not None:
        return recorded
    state = situation.slurm_state if row.state is None else row.state
    is_stuck = not row.source and state is RunState.PENDING and fact is not None and _never_starts(fact)
    source = row.source or (fact.source if fact is not None else "none")
    return StateReport(state, row.reason(situation), source, is_stuck)


def explain_facts(fact: JobFacts) -> str:
    """`Slurm: PENDING (Priority)`, and why a requeued or held job waits."""
    if not fact.state:
        return fact.reason
    explanation = f"Slurm: {fact.state}" + (f" ({fact.reason})" if fact.reason else "")
    if run_state(fact.state) is not RunState.PENDING:
        return explanation  # the times and the reason are those of its last wait
    begin = fact.eligible_time or fact.start_time
    if fact.reason == "BeginTime" and begin:
        if not fact.restarts:
            return f"{explanation}: not before {begin}"
        times = "once" if fact.restarts == 1 else f"{fact.restarts} times"
        return f"{explanation}: requeued {times}, and Slurm holds a requeued job back until {begin}"
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
    """One task of an array run. `job_id` is Slurm's, `123_4`; `source` and `cannot_start` are those of a `StateReport`.

    `values` are the swept values of the task.
    """

    task: int
    job_id: str
    state: RunState
    reason: str
    source: str
    exit_code: int | None
    cannot_start: bool = False
    values: Values | None = None

    @property
    def named(self) -> str:
        """`task 3`, or `task 3 (train.lr=0.0003)`."""
        return f"task {self.task} ({in_words(self.values)})" if self.values else f"task {self.task}"

    def as_json(self) -> dict[str, Any]:
        """One of the `tasks` of `status --json`."""
        return {
            "task": self.task, "job_id": self.job_id, "state": self.state.value, "reason": self.reason,
            "exit_code": self.exit_code, "values": None if self.values is None else dict(self.values),
        }  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """A run. `reason` is a sentence on what is known; `source` is where it comes from."""

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
    tasks: tuple[TaskStatus, ...] | None = None  # of an array run
    cannot_start: bool = False  # of a `StateReport`; of an array if none of its open tasks can start
    values: Values | None = None  # the swept values, of a task of a sweep
    validation: ValidationRecord | None = None  # the last one that the run has not gone back over
    cluster: str = ""  # if the job names another cluster than its site's

    @property
    def full_job_id(self) -> str:
        """The job's id as a user gives it."""
        return named(self.job_id, self.cluster)

    @property
    def validated(self) -> str:
        """The last validation as a sentence, with why it ended the run if it did; "" before the first."""
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
        """The documented JSON of `status --json`."""
        tasks = None if self.tasks is None else [task.as_json() for task in self.tasks]
        validation = None if self.validation is None else self.validation.as_json()
        without = replace(self, tasks=None, validation=None)  # both have their own JSON form
        value = {**asdict(without), "state": self.state.value, "tasks": tasks, "validation": validation}
        del value["cannot_start"]  # `explain --json` has it, with the reason
        return value


def summarize_tasks(tasks: Sequence[TaskStatus]) -> tuple[RunState, str, int | None]:
    """The state of an array, its tasks by state (`3 running, 6 pending`), and the exit code of the first task in that state."""
    counts = Counter(task.state for task in tasks)
    state = next((state for state in _ORDER if counts[state]), RunState.UNKNOWN)
    code = next((task.exit_code for task in tasks if task.state is state and task.exit_code is not None), None)
    return state, ", ".join(f"{counts[one]} {one.value}" for one in _ORDER if counts[one]), code
