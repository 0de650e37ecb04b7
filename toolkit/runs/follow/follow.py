"""Wait for a run and report its progress: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from toolkit.errors import OWN_FAILURE, InterruptedWaitError, counted
from toolkit.metrics.run_metrics import Newest, newest_metrics
from toolkit.rundir.attempt_records import FAILED_INSIDE, AttemptRecord
from toolkit.rundir.claims import start_has_ended
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import ENDINGS, RunState
from toolkit.runs.status.restarts import RestartNews
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import RECORD_SOURCE, RunStatus, state_phrase
from toolkit.supervise.symptoms import STEP_FAILED
from toolkit.terminal.progress import WIDTH, PlainBarColumn, given_back
from toolkit.terminal.talk import clean

__all__ = ["Follower", "exit_code_of", "follow_to_end", "report_end"]

# Seconds between checks of the run directory's files.
MARKER_PERIOD_S = 0.5
# First and longest pause between two queries to Slurm.
QUERY_PERIODS_S = (2.0, 60.0)
# Seconds for which an end known only from Slurm must last: NFS shows files of other hosts late, after 3 s or more.
SETTLE_S = 3.0
# The same if Slurm reports the job as completed, because its result must then appear. NFS shows a new file only at the
# next check of its folder, 30 s to 60 s later by default (nfs(5), acdirmin and acdirmax).
RESULT_S = 60.0
# Seconds in which the supervisor writes its last files and resolves alerts after the end of its last attempt, if it lives.
LEAVING_S = 2.0
# Seconds between lines of progress without a terminal.
LINE_PERIOD_S = 5.0
# Sources of a state from Slurm: those for a job that it knows, and all, including that for a forgotten job.
_OF_A_JOB, _OF_SLURM = ("squeue", "sacct"), ("squeue", "sacct", "Slurm")


def exit_code_of(status: RunStatus) -> int:
    """Return the exit code of the job: that of the supervisor if known, else the usual one for the final state."""
    if status.exit_code is not None:
        return status.exit_code
    for ending in ENDINGS.values():
        if ending.final_state is status.state and ending.exit_code is not None:
            return ending.exit_code
    return OWN_FAILURE


def settle_s(status: RunStatus) -> float:
    """Return for how many seconds the end of a run, or of its last task, must last before it counts as final."""
    states = [(task.state, task.source) for task in status.tasks or ()] or [(status.state, status.source)]
    if any(state is RunState.LOST and source in _OF_A_JOB for state, source in states):
        return RESULT_S
    return SETTLE_S if any(source in _OF_SLURM for _, source in states) else 0.0


@dataclass
class Follower:
    """Follows a run until it ends; queries Slurm less and less often, and checks the run's own files continuously."""

    run: RunDirectory
    console: Console = field(default_factory=lambda: Console(stderr=True))
    _pause_s: float = QUERY_PERIODS_S[0]
    _asked_at: float = float("-inf")
    _status: RunStatus | None = None
    _marks: tuple[int, ...] = ()
    _marked_at: float = float("-inf")
    _ended_at: float | None = None

    def wait(self) -> RunStatus:
        """Block until the run has ended."""
        last_state, printed, printed_at = None, "", float("-inf")
        restarts, stuck = RestartNews(self.run), False
        with self._bar() as (bar, task):
            while True:
                status = self.look()
                for line in restarts.new():
                    self.console.print(line, highlight=False, markup=False, soft_wrap=True)
                record = newest_metrics(self.run.metrics)
                text = self._describe(status, record)
                if bar is not None and task is not None:
                    done, total = (record.step, record.steps) if record else (0, None)
                    bar.update(task, description=text, completed=done, total=total)
                elif status.state is not last_state or (
                    text != printed and time.monotonic() - printed_at >= LINE_PERIOD_S
                ):
                    printed, printed_at = text, time.monotonic()
                    self.console.print(text, highlight=False, markup=False, soft_wrap=True)
                if status.cannot_start and not stuck:
                    self.console.print(
                        f"the job cannot start as it is: `toolkit explain {self.run.run_id}` states the reason",
                        highlight=False, markup=False, soft_wrap=True,
                    )  # fmt: skip
                last_state, stuck = status.state, stuck or status.cannot_start
                if self._has_settled(status):
                    return status
                time.sleep(MARKER_PERIOD_S)

    def look(self) -> RunStatus:
        """Return a status at most one pause old, updated when the run's own files change."""
        now = time.monotonic()
        marks = self._marks
        if now - self._marked_at >= MARKER_PERIOD_S:
            marks, self._marked_at = _marks(self.run), now
        moved = marks != self._marks
        local = self._status is not None and self._status.job_id.startswith("local-")
        if self._status is None or moved or local or now - self._asked_at >= self._pause_s:
            fresh = run_status(self.run)
            if moved or (self._status is not None and fresh.state is not self._status.state):
                self._pause_s = QUERY_PERIODS_S[0]
            else:
                self._pause_s = min(self._pause_s * 1.5, QUERY_PERIODS_S[1])
            self._status, self._asked_at, self._marks = fresh, now, marks
        return self._status

    def is_over(self) -> bool:
        """Return whether the run has ended for good."""
        return self._has_settled(self.look())

    def _has_settled(self, status: RunStatus) -> bool:
        """Return whether the end has lasted for `settle_s`: the run's own record may appear after Slurm's answer."""
        if not status.state.final:
            self._ended_at = None  # the run is active again, for example after a requeue
            return False
        self._ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        needed_s = LEAVING_S if self._is_leaving(status) else 0.0
        return time.monotonic() - self._ended_at >= max(needed_s, settle_s(status))

    def _is_leaving(self, status: RunStatus) -> bool:
        """Return whether the supervisor has recorded the end of its attempt, but not yet that of its start."""
        numbers = self.run.start_numbers() if status.tasks is None else []
        return bool(numbers) and not start_has_ended(self.run, numbers[-1])

    def _describe(self, status: RunStatus, record: Newest | None) -> str:
        head = f"{status.job_name} {status.state.value}"
        if status.tasks is not None:
            return f"{head}: {clean(status.reason)}"
        attempt = self.run.last_attempt()
        if status.state is RunState.RUNNING and attempt is None:
            return f"{head}: the supervisor is starting"
        if status.state is RunState.RUNNING and attempt is not None:
            if record is None or record.attempt < attempt.number:
                begun = sum(1 for _ in attempt.ranks.glob("rank-*.json"))
                return f"{head}: {begun} of {counted(status.ranks, 'rank')} started"
            return f"{head}: {record}"
        if status.state is RunState.COMPLETED and record is not None:
            return f"{head}: {record}"
        if status.state.final and settle_s(status) == RESULT_S:
            return f"{head}: Slurm reports the job as completed; waiting for its result"
        if status.state.final:
            return head  # `report_end` prints the reason
        return f"{head}: {status.reason}"

    @contextmanager
    def _bar(self) -> Iterator[tuple[Progress | None, TaskID | None]]:
        if not self.console.is_terminal:
            yield None, None
            return
        drawn = BarColumn(bar_width=WIDTH) if self.console.color_system else PlainBarColumn()
        columns = (TextColumn("{task.description}", markup=False), drawn, TimeElapsedColumn())
        with given_back(), Progress(*columns, console=self.console, refresh_per_second=4) as bar:
            yield bar, bar.add_task("", total=None)


def _marks(run: RunDirectory) -> tuple[int, ...]:
    """Return values that change when a start or an attempt of the run or a task starts or ends."""
    files = (
        "submitted-*.json", "starts/*/claim.json", "starts/*/end.json", "attempts/*/start.json",
        "attempts/*/exit.json",
    )  # fmt: skip
    return tuple(sum(1 for _ in run.path.glob(below + name)) for below in ("", "tasks/*/") for name in files)


def follow_to_end(run: RunDirectory, *, plain: bool = False) -> int:
    """Wait until a run has ended and report how; return the job's exit code. `plain` draws in ASCII without colors.

    Raises:
        InterruptedWaitError: Ctrl-C, which ends only the wait.
    """
    follower = Follower(run, Console(stderr=True, color_system=None if plain else "auto"))
    try:
        status = follower.wait()
    except KeyboardInterrupt:
        raise InterruptedWaitError(
            f"the run continues; `toolkit wait {run.run_id}` follows it again, `toolkit cancel {run.run_id}` ends it"
        ) from None
    report_end(status, run, follower.console)
    return exit_code_of(status)


def report_end(status: RunStatus, run: RunDirectory, console: Console) -> None:
    """Report a failure: the rank, the reason and its last lines, from the supervisor's record if there is one.

    A completed script is reported if steps failed inside it.
    """
    if status.state is RunState.COMPLETED and FAILED_INSIDE not in status.reason:
        return
    attempt = run.last_attempt() if status.source == RECORD_SOURCE else None
    end = AttemptRecord.read(attempt) if attempt else None
    console.print(
        f"run {status.run_id} {state_phrase(status.state)}: {clean(status.reason)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for line in end.last_lines if end is not None else ():
        console.print(f"    | {clean(line)}", markup=False, highlight=False, soft_wrap=True)
    fix = STEP_FAILED.fix if status.state is RunState.COMPLETED else end.fix if end is not None else ""
    if fix:
        console.print(f"fix: {clean(fix)}", markup=False, highlight=False, soft_wrap=True)
