"""Rehearse a failure: cause it in a running run, follow the run until it continues, and report the cost.

docs/rehearse.md describes each failure. All times are read from the run's own files; the clocks of their hosts must
agree with this host's to within a second.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from toolkit.errors import CheckFailedError, counted
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.files import read_json_or_none, read_lines, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.run_files import read_folder
from toolkit.rundir.states import RunState
from toolkit.runs.status.restarts import follows
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import recorded_state, state_phrase

__all__ = ["Injected", "lines_of", "rehearse", "require_stepping", "what_is_at_stake"]

POLL_S = 0.3


@dataclass(frozen=True)
class Rehearsal:
    """The cost of a failure, in seconds of wall clock; None for stages that were not reached."""

    run_id: str
    failure: str
    done: str
    cause: str
    attempt: int
    next_attempt: int
    steps: int
    resumed_at: int
    steps_repeated: int
    detect_s: float
    queue_s: float
    start_s: float
    first_step_s: float
    repeat_s: float | None
    lost_s: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `rehearse --json`."""
        return asdict(self)


@dataclass(frozen=True)
class Injected:
    """A failure that has happened. `in_queue` is called repeatedly between two starts, until it returns True."""

    done: str
    in_queue: Callable[[], bool] = lambda: True


# Entering causes the failure; leaving undoes changes that must not outlast the rehearsal.
Inject = Callable[[], AbstractContextManager[Injected]]


class RunEndedError(CheckFailedError):
    """The run has ended, and does not continue by itself."""

    def __init__(self, run: RunDirectory, state: RunState, before: str, reason: str) -> None:
        super().__init__(
            f"the run ended ({state.value}) before {before}: {reason}",
            where=str(run.path),
            fix=f"`toolkit explain {run.run_id}`",
        )
        self.state = state


class RehearsalTimeoutError(CheckFailedError):
    """The run has not ended, but did not reach the expected event in time."""


def rehearse(
    run: RunDirectory, failure: str, inject: Inject, *, timeout_s: float, tell: Callable[[str], None]
) -> Rehearsal:
    """Cause the failure and follow the run until it has made a new step, or has ended.

    Raises:
        RunEndedError: the run did not survive, or completed before it made another step.
        RehearsalTimeoutError: it made no other step within `timeout_s`.
        CheckFailedError: the run is not making steps.
    """
    before = require_stepping(run)
    begun = time.time()
    with inject() as injected:
        tell(injected.done)
        _leave_word(before, failure, injected.done, tell)
        watch = _Watch(run, before, begun + timeout_s)
        over = _until_over(watch, tell)
        again = _until_stepping(watch, injected.in_queue, tell)
        # The heartbeat lags; the attempt completed all steps before the one at which the next attempt resumed.
        steps = max(over.steps, again.first_step)
        attempt, passed = _until_new_step(watch, again.attempt, steps, tell)
    failed_at = _asked_at(before, begun) if failure == "walltime" else begun
    return Rehearsal(
        run.run_id, failure, injected.done, over.cause, before.number, attempt.number,
        steps, again.first_step, steps - again.first_step,
        detect_s=_gap(failed_at, over.time), queue_s=_gap(over.time, again.began), start_s=_gap(again.began, again.ranks_at),
        first_step_s=_gap(again.ranks_at, again.first_at), repeat_s=None if passed is None else _gap(again.first_at, passed),
        lost_s=None if passed is None else _gap(failed_at, passed),
    )  # fmt: skip


def _leave_word(attempt: AttemptDirectory, failure: str, done: str, tell: Callable[[str], None]) -> None:
    """Record the failure, so that `explain` can report it as a rehearsal."""
    try:
        write_json(attempt.rehearsed, {"failure": failure, "done": done, "time": utc_now()})
    except OSError as error:  # the failure has happened, so the rehearsal continues
        tell(f"cannot write {attempt.rehearsed}: {error.strerror}; `toolkit explain` will not know of the rehearsal")


def require_stepping(run: RunDirectory) -> AttemptDirectory:
    """Return the attempt that is making steps.

    Raises:
        CheckFailedError: the run is not running, or has not made a step yet.
    """
    status = run_status(run)
    if status.tasks is not None:
        raise CheckFailedError(
            f"run {run.run_id} is an array, but a rehearsal needs one task",
            fix=f"`toolkit rehearse {run.run_id}_T ...` with a task number T",
        )
    attempt = run.last_attempt()
    if status.state is not RunState.RUNNING or attempt is None or attempt.exit_file.exists():
        raise CheckFailedError(
            f"run {run.run_id} {state_phrase(status.state)}; only a running run can be rehearsed",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id}`; retry when it shows steps",
        )
    if not attempt.heartbeat.exists():
        raise CheckFailedError(
            f"run {run.run_id} has not made a step in attempt {attempt.number}",
            where=str(attempt.heartbeat),
            fix="wait for its first step; a script or executable has steps if observe.step_line matches lines that rank 0 "
            "prints, or if it calls `toolkit.step`",
        )
    return attempt


@dataclass(frozen=True)
class _Watch:
    """Checks the run's files until `deadline`, in seconds since the epoch."""

    run: RunDirectory
    before: AttemptDirectory
    deadline: float

    def ticks(self, what: str) -> Iterator[None]:
        """Yield repeatedly, until the caller has seen `what` and stops.

        Raises:
            RunEndedError: the run has ended.
            RehearsalTimeoutError: the deadline has passed.
        """
        while True:
            ended = recorded_state(
                read_folder(self.run)
            )  # read before the caller checks, which then sees all that precedes the end
            yield
            if ended is not None:
                raise RunEndedError(self.run, ended.state, what, ended.reason)
            if time.time() > self.deadline:
                status = run_status(self.run)
                if status.state.final:  # known from Slurm or the process table; the run left no record
                    raise RunEndedError(self.run, status.state, what, status.reason)
                raise RehearsalTimeoutError(
                    f"gave up before {what}; the run {state_phrase(status.state)} ({status.reason})",
                    where=str(self.run.path),
                    fix=f"`toolkit wait {self.run.run_id}` continues to follow it, or choose a longer --timeout",
                )
            time.sleep(POLL_S)


@dataclass(frozen=True)
class _Over:
    """The end of the failed attempt: its last step, the end time and the cause."""

    steps: int
    time: float
    cause: str


@dataclass(frozen=True)
class _Again:
    """The next attempt: when it started, when its last rank started, and its first step with the time."""

    attempt: AttemptDirectory
    began: float
    ranks_at: float
    first_step: int
    first_at: float


def _until_over(watch: _Watch, tell: Callable[[str], None]) -> _Over:
    attempt = watch.before
    steps = steps_done(watch.run, attempt)
    for _ in watch.ticks("the attempt was over"):
        if _later(watch) is None:  # once the next attempt has records, they hide those of this one
            steps = max(steps, steps_done(watch.run, attempt))
        end = AttemptRecord.read(attempt)
        if end is not None:
            tell(f"attempt {attempt.number} ended at step {steps}: {end.cause}; {follows(end)}")
            return _Over(steps, _epoch(end.time), end.cause.value)
        later = _later(watch)
        if later is not None and (begun := StartRecord.read(later)) is not None:
            # The supervisor of the attempt was lost, too, and did not record its end.
            return _Over(steps, _epoch(begun.time), "supervisor_lost")
    raise AssertionError("the iterator `ticks` never ends")


def _until_stepping(watch: _Watch, in_queue: Callable[[], bool], tell: Callable[[str], None]) -> _Again:
    reported, settled = -1, False
    for _ in watch.ticks("the next attempt made a step"):
        settled = settled or in_queue()
        attempt = _later(watch)
        begun = StartRecord.read(attempt) if attempt is not None else None
        if attempt is None or begun is None:
            continue
        if attempt.number > reported:
            reported = attempt.number
            tell(
                f"attempt {attempt.number} begins on {counted(begun.nodes, 'node')} with {counted(begun.ranks, 'rank')}"
            )
        beat = read_json_or_none(attempt.heartbeat)
        if beat is not None:
            ranks = [read_json_or_none(path) for path in attempt.ranks.glob("rank-*.json")]
            started = _epoch(begun.time)
            last = max((_epoch(rank["time"]) for rank in ranks if rank is not None), default=started)
            tell(f"attempt {attempt.number} is making steps")
            return _Again(attempt, started, last, int(beat["step"]), _epoch(beat["time"]))
    raise AssertionError("the iterator `ticks` never ends")


def _until_new_step(
    watch: _Watch, attempt: AttemptDirectory, steps: int, tell: Callable[[str], None]
) -> tuple[AttemptDirectory, float | None]:
    """Return the attempt that made the first new step, and when; no time after a timeout or if the run completed."""
    try:
        for _ in watch.ticks(f"step {steps + 1}"):
            last = _later(watch) or attempt
            if last.number > attempt.number and last.start_file.exists():
                tell(f"attempt {attempt.number} ended too; attempt {last.number} follows")
                attempt = last
            beat = read_json_or_none(attempt.heartbeat)
            if beat is not None and beat["step"] > steps:
                return attempt, _epoch(beat["time"])
    except RehearsalTimeoutError as error:
        tell(str(error))
    except RunEndedError as error:
        if error.state is not RunState.COMPLETED:
            raise
        tell(error.message)
    return attempt, None


def _later(watch: _Watch) -> AttemptDirectory | None:
    last = watch.run.last_attempt()
    return last if last is not None and last.number > watch.before.number else None


def steps_done(run: RunDirectory, attempt: AttemptDirectory) -> int:
    """Return the last step of an attempt in any file; the heartbeat alone lags by up to a second."""
    beat, record = read_json_or_none(attempt.heartbeat), last_record(run.metrics / "train.jsonl")
    of_records = record.step if record is not None and record.attempt == attempt.number else 0
    return max(int(beat["step"]) if beat is not None else 0, of_records)


def _asked_at(attempt: AttemptDirectory, otherwise: float) -> float:
    """Return when the supervisor was warned of the walltime, because steps before that time are not lost."""
    asked = [event["time"] for event in read_lines(attempt.events) if event["event"] == "stop_requested"]
    return _epoch(asked[0]) if asked else otherwise


def _epoch(moment: str) -> float:
    return datetime.fromisoformat(moment).astimezone(UTC).timestamp()


def _gap(first: float, second: float) -> float:
    return round(max(0.0, second - first), 1)


def lines_of(cost: Rehearsal) -> Iterator[str]:
    """Yield the lines of the rehearsal's report."""
    yield f"survived  {cost.failure}: attempt {cost.attempt} ended as {cost.cause}, attempt {cost.next_attempt} continues"
    yield f"steps     {cost.steps} were done, it resumed from {cost.resumed_at}: {cost.steps_repeated} repeated"
    repeat = "" if cost.repeat_s is None else f" + repeat {cost.repeat_s}"
    whole = "no new step" if cost.lost_s is None else f"{cost.lost_s} s lost"
    yield (
        f"seconds   {whole}: detect and save {cost.detect_s} + queue {cost.queue_s} + start {cost.start_s} "
        f"+ first step {cost.first_step_s}{repeat}"
    )


def what_is_at_stake(run: RunDirectory, attempt: AttemptDirectory) -> str:
    """Describe what the run would fall back to, for the confirmation before the failure."""
    kept = run.committed_checkpoints()
    fallback = f"its newest checkpoint is {kept[-1].name}" if kept else "it has no checkpoint yet"
    return f"{run.job_name} {run.run_id} is at step {steps_done(run, attempt)}; {fallback}"
