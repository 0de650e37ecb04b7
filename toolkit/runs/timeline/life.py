"""Determine from the files of a run how it spent its time: waiting, starting, stepping, saving, and lost steps."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from itertools import islice
from pathlib import Path

from toolkit.metrics.checkpoints import SaveRecord, read_save_log
from toolkit.metrics.record_search import first_where
from toolkit.metrics.training import TrainRecord
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord, reason_of
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none, read_lines
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, start_of
from toolkit.rundir.states import NEXT_START_BEGAN, Cause, Next, RunState
from toolkit.runs.record.job import recorded_job
from toolkit.supervise.launch import is_unmanaged

MOST_RANKS_READ = 64  # rank files that are read to find when the ranks had started


class What(StrEnum):
    """A use of time."""

    WAITING = "waiting"  # in the queue
    STARTING = "starting"
    STEPS = "steps"  # for a program that reports no steps: the time after its ranks started
    SAVING = "saving"
    LOST = "lost"  # time of steps that no checkpoint contains, whether repeated later or not


@dataclass(frozen=True)
class Span:
    """A period; times are seconds since the epoch."""

    what: What
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Mark:
    """An event. `what` is the cause that ended an attempt, or "resumed" or "killed"."""

    what: str
    time: float
    words: str


@dataclass
class Piece:
    """An attempt with the wait before it; `number` is None if the attempt has not started."""

    number: int | None
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    end: str = ""


def life_of(run: RunDirectory, state: RunState) -> list[Piece]:
    """Return the attempts of a run, or of a task, whose current state is `state`. Unfinished ones last until now."""
    return _Reader(run, state, time.time()).pieces()


def moment(text: str) -> float:
    """Convert a time in the run's files to seconds since the epoch."""
    return datetime.fromisoformat(text).astimezone(UTC).timestamp()


@dataclass
class _Reader:
    run: RunDirectory
    state: RunState
    now: float

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        ended_at: float | None = None  # the end time of the previous start
        attempts = [self.run.attempt(number) for number in self.run.attempt_numbers()]
        starts = sorted({*self.run.start_numbers(), *self._submitted_starts()})
        for start in starts:
            waited = self._waiting(start, ended_at)
            resumed = self._resumed(start)
            own = [attempt for attempt in attempts if _start_of(attempt) == start]
            lived = [self._attempt(attempt) for attempt in own] or [Piece(None)]
            lived[0].spans[:0], lived[0].marks[:0] = waited, resumed
            found += lived
            ended_at = self._end_of_start(start, own)
        if self.state is RunState.PENDING and ended_at is not None:  # requeued, and the next start is not claimed yet
            found.append(Piece(None, [Span(What.WAITING, ended_at, self.now)]))
        return [piece for piece in found if piece.spans or piece.marks]

    def _submitted_starts(self) -> set[int]:
        """Return all submitted starts, begun or not; the first start of a task is that of its array."""
        own = set(map(start_of, self.run.path.glob("submitted-*.json")))
        return own | ({0} if self.run.whole.submitted(0).exists() else set())

    def _waiting(self, start: int, before: float | None) -> list[Span]:
        """Return the wait from the submission, or from the end of the previous start, until the supervisor started."""
        submitted = read_json_or_none(self.run.submitted(start)) or read_json_or_none(self.run.whole.submitted(start))
        claim = read_claim(self.run, start)
        begin = moment(submitted["time"]) if submitted is not None else before
        until = self.now if self.state is RunState.PENDING else None
        if claim is not None and claim.claimed:
            until = moment(claim.claimed)
        if begin is None or until is None or until <= begin:
            return []
        return [Span(What.WAITING, begin, until)]

    def _resumed(self, start: int) -> list[Mark]:
        record = read_json_or_none(self.run.whole.resumed(start)) if start in self.run.resumed_starts() else None
        return [Mark("resumed", moment(record["time"]), "resumed")] if record and "time" in record else []

    def _end_of_start(self, start: int, attempts: Sequence[AttemptDirectory]) -> float | None:
        """Return when the start ended; None if it has not, or if that is unknown."""
        end = read_json_or_none(self.run.start(start) / "end.json")
        if end is not None:
            return moment(end["time"])
        if not attempts or self._runs(attempts[-1]):
            return None
        return self._last_sign(attempts[-1])

    def _attempt(self, attempt: AttemptDirectory) -> Piece:
        begun, written = StartRecord.read(attempt), AttemptRecord.read(attempt)
        assert begun is not None  # `pieces` selects attempts by this record
        piece = Piece(attempt.number)
        began, ended = moment(begun.time), self._ended(attempt, written)
        stepped = min(self._stepped(attempt, began, ended), ended)
        piece.spans.append(Span(What.STARTING, began, stepped))
        lost = self._lost(attempt, written, stepped, ended)
        saves = [save for save in self._saves if save.attempt == attempt.number]
        piece.spans += _with_saves(stepped, lost, ended, saves)
        piece.spans = [span for span in piece.spans if span.ended > span.began]
        piece.marks = list(_marks(attempt, written, ended))
        piece.end = written.cause.value if written is not None else ""
        return piece

    def _ended(self, attempt: AttemptDirectory, written: AttemptRecord | None) -> float:
        """Return when an attempt ended. If the supervisor was lost, the next start recorded it, maybe hours later."""
        if written is not None and written.decision != NEXT_START_BEGAN:
            return moment(written.time)
        return self.now if written is None and self._runs(attempt) else self._last_sign(attempt)

    def _runs(self, attempt: AttemptDirectory) -> bool:
        return self.state in (RunState.RUNNING, RunState.CANCELLING) and attempt == self.run.last_attempt()

    def _last_sign(self, attempt: AttemptDirectory) -> float:
        begun, beat = StartRecord.read(attempt), read_json_or_none(attempt.heartbeat)
        times = [event["time"] for event in read_lines(attempt.events) if event["event"] != "ended"]
        times += [begun.time] if begun is not None else []
        times += [beat["time"]] if beat is not None else []
        return max(map(moment, times))

    def _stepped(self, attempt: AttemptDirectory, began: float, ended: float) -> float:
        """Return when the first step of an attempt started; for a run without steps, when its ranks had started."""
        first = self._record(attempt.number, 0)
        if first is not None:
            return max(began, moment(first.time) - first.seconds)
        will_tell = self._runs(attempt) and not is_unmanaged(recorded_job(self.run).job.entry)
        if self._tells_steps or will_tell:
            return ended
        ranks = islice(attempt.ranks.glob("rank-*.json"), MOST_RANKS_READ)
        return max((moment(rank["time"]) for rank in map(read_json_or_none, ranks) if rank is not None), default=began)

    def _lost(self, attempt: AttemptDirectory, written: AttemptRecord | None, stepped: float, ended: float) -> float:
        """Return the time after which the steps of an attempt were lost: not saved, or repeated by the next attempt."""
        if written is None or written.cause is Cause.COMPLETED or not self._tells_steps:
            return ended
        later = first_where(self._log, TrainRecord.from_line, lambda record: record.attempt > attempt.number)
        again = self._record(attempt.number, later.step) if later is not None else None
        if again is not None:  # with `log_every`, the next attempt's first record may be many steps after its resume
            return max(stepped, moment(again.time) - again.seconds)
        kept = [save for save in self._saves if save.attempt == attempt.number and save.committed_s is not None]
        if not kept:
            return stepped
        return ended if (written.step or 0) <= kept[-1].step else max(stepped, kept[-1].went_on_at)

    def _record(self, attempt: int, step: int) -> TrainRecord | None:
        """Return the first record of an attempt at or after a step."""
        found = first_where(
            self._log, TrainRecord.from_line, lambda record: (record.attempt, record.step) >= (attempt, step)
        )
        return found if found is not None and found.attempt == attempt else None

    @property
    def _log(self) -> Path:
        return self.run.metrics / "train.jsonl"

    @cached_property
    def _tells_steps(self) -> bool:
        return first_where(self._log, TrainRecord.from_line, lambda _: True) is not None

    @cached_property
    def _saves(self) -> list[SaveRecord]:
        return read_save_log(self.run.metrics / "checkpoints.jsonl")


def _start_of(attempt: AttemptDirectory) -> int:
    started = StartRecord.read(attempt)
    return started.start if started is not None else -1


def _with_saves(stepped: float, lost: float, ended: float, saves: Iterable[SaveRecord]) -> Iterator[Span]:
    """Yield the steps, kept and lost, with the pauses for saves between them."""
    at = stepped
    for save in saves:
        begin, until = (min(max(at, moment), ended) for moment in (save.began_at, save.went_on_at))
        yield from _steps(at, begin, lost)
        yield Span(What.SAVING, begin, until)
        at = until
    yield from _steps(at, ended, lost)


def _steps(began: float, ended: float, lost: float) -> Iterator[Span]:
    yield Span(What.STEPS, began, min(ended, max(began, lost)))
    yield Span(What.LOST, min(ended, max(began, lost)), ended)


_FOLLOWS = {
    Next.END: "", Next.RESTART: "; restarted", Next.REQUEUE: "; requeued", Next.AWAIT: "; Slurm requeues it",
    Next.FOLLOW_UP: "; a follow-up job continues it",
}  # fmt: skip


def _marks(attempt: AttemptDirectory, written: AttemptRecord | None, ended: float) -> Iterator[Mark]:
    asked = ""
    for event in read_lines(attempt.events):
        if event["event"] == "stop_requested":
            asked = str(event["cause"])
            yield Mark(asked, moment(event["time"]), f"asked to save and exit: {asked}")
        elif event["event"] == "killed":
            yield Mark("killed", moment(event["time"]), f"killed: {event['reason']}")
    if written is None:
        return
    cause = written.cause.value
    step = f" at step {written.step}" if written.step is not None else ""
    place = f" ({written.culprit})" if written.culprit else ""
    why = "" if cause in (Cause.COMPLETED, asked) else f": {reason_of(attempt, written)}"
    follows = "; another start continues" if written.decision == NEXT_START_BEGAN else _FOLLOWS[written.next]
    yield Mark("ended" if cause == asked else cause, ended, f"{cause}{step}{place}{why}{follows}")
