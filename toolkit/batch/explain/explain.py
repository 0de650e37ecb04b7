"""Why a run is in the state it is in, what follows by itself, and what to do now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.batch.run_status import RunStatus
from toolkit.batch.state import run_status
from toolkit.batch.submission import recorded_job
from toolkit.errors import ToolkitError, counted
from toolkit.rundir.files import read_json_or_none, read_lines
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.rundir.sweep import in_words
from toolkit.slurm.reasons import CanStart
from toolkit.supervise.failures import clean

LAST_EVENTS = 5


@dataclass(frozen=True)
class Evidence:
    """A quoted line and where it stands: a path below the run directory, or the command that printed it."""

    source: str
    line: str


@dataclass(frozen=True)
class Waiting:
    """Of a run in the queue. `estimated_start` is what `squeue --start` says, `not_before` what is certain; both UTC."""

    reason: str
    can_start: CanStart
    not_before: str | None = None
    estimated_start: str | None = None


@dataclass(frozen=True)
class Explanation:
    """A run at one moment, as `explain` tells it. `symptom` is one stable word; docs/explain.md lists them.

    `why` is the cause in a sentence, `follows` what happens by itself, `actions` what the user can do, best first.
    """

    symptom: str
    why: str
    follows: str = ""
    actions: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    waiting: Waiting | None = None
    rank: int | None = None
    host: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    status: RunStatus | None = None

    def as_json(self) -> dict[str, Any]:
        """The documented JSON of `explain --json`."""
        assert self.status is not None  # `explain_run` lays it in
        value = asdict(self)
        del value["status"]
        return {
            "run_id": self.status.run_id,
            "state": self.status.state.value,
            **value,
            "status": self.status.as_json(),
        }


def explain_run(run: RunDirectory, *, echo: bool = False) -> Explanation:
    """Read everything that says something about a run: its files, then Slurm."""
    from toolkit.batch.explain.array import explain_array
    from toolkit.batch.explain.chain import explain_broken_chain
    from toolkit.batch.explain.ended import explain_ended
    from toolkit.batch.explain.living import explain_living
    from toolkit.batch.explain.waiting import explain_waiting

    status = run_status(run, echo=echo)
    if (broken := explain_broken_chain(run, status)) is not None:
        told = broken
    elif status.tasks is not None and status.state is not RunState.CREATED:
        told = explain_array(run, status, echo=echo)
    elif status.state.final:
        told = explain_ended(run, status, echo=echo)
    elif status.state is RunState.PENDING:
        told = explain_waiting(run, status, echo=echo)
    else:
        told = explain_living(run, status)
    evidence = [*told.evidence, *_validated(run, status), *_guarded(run), *_rehearsals(run, status)]
    return replace(told, status=status, events=last_events(run), evidence=evidence)


def _validated(run: RunDirectory, status: RunStatus) -> list[Evidence]:
    """How good the model was at last, where the run looked."""
    return [quote_file(run, run.metrics / "validation.jsonl", status.validated)] if status.validated else []


def _guarded(run: RunDirectory) -> list[Evidence]:
    """How many bad steps `train.guard` has found, as the newest checkpoint counts them."""
    from toolkit.checkpoint.format.layout import MANIFEST
    from toolkit.checkpoint.format.manifest_file import read_body

    newest = run.committed_checkpoints()[-1:]
    if not newest or recorded_job(run).train.guard == "off":
        return []
    try:
        bad = read_body(newest[0])["state"]["extra"]["guard"]["bad_steps"]
    except (ToolkitError, OSError, KeyError, TypeError):  # damaged, which `ckpt verify` tells, or of another guard
        return []
    which = f"; the log names {'it' if bad == 1 else 'each'}: `toolkit logs {run.run_id} --rank 0`"
    return [quote_file(run, newest[0] / MANIFEST, f"the guard found {counted(bad, 'bad step')}{which}")] if bad else []


def _rehearsals(run: RunDirectory, status: RunStatus) -> list[Evidence]:
    """Failures that were no accidents: what `toolkit rehearse` did to the attempt that is explained.

    Of a living attempt that is also the one before it; what was done to earlier ones explains nothing now.
    """
    said = []
    for attempt in map(run.attempt, run.attempt_numbers()[-2:]):
        explained = attempt == run.last_attempt() or not _has_ended(run, status)
        if explained and (word := read_json_or_none(attempt.rehearsed)) is not None:
            told = f"{word['failure']} was rehearsed at {word['time']}: {word['done']}"
            said.append(quote_file(run, attempt.rehearsed, told))
    return said


def _has_ended(run: RunDirectory, status: RunStatus) -> bool:
    """True where the last attempt is over, whatever follows it."""
    last = run.last_attempt()
    return status.state.final or (last is not None and last.exit_file.exists())


def last_events(run: RunDirectory, count: int = LAST_EVENTS) -> list[dict[str, Any]]:
    """The last events of the run, oldest first, each with its attempt."""
    found: list[dict[str, Any]] = []
    for number in reversed(run.attempt_numbers()):
        of_attempt = [{"attempt": number, **event} for event in read_lines(run.attempt(number).events)]
        found = of_attempt + found
        if len(found) >= count:
            break
    return found[-count:]


def lines_of(told: Explanation) -> Iterator[str]:
    """The explanation for people: what, why, what follows, what to do."""
    status = told.status
    assert status is not None  # `explain_run` lays it in
    job = f" (job {status.full_job_id})" if status.job_id else ""
    job += f" with {in_words(status.values)}" if status.values else ""
    step = f", step {status.step}" if status.step is not None else ""
    yield f"{status.job_name} {status.run_id}{job} is {status.state.value}{step}"
    yield f"why       {told.why}"
    for quoted in told.evidence:
        line = clean(quoted.line).replace("\n", " ")
        yield (f"          {quoted.source} says so" if line in told.why else f"          {quoted.source}: {line}")
    if told.waiting is not None:
        yield f"start     {_start_in_words(told.waiting)}"
    if told.events:
        yield "events    " + "; ".join(_event_in_words(event) for event in told.events[-3:])
    yield f"follows   {told.follows or 'nothing by itself'}"
    for number, action in enumerate(told.actions):
        yield f"{'' if number else 'do':<10}{action}"


def _start_in_words(waiting: Waiting) -> str:
    if waiting.can_start is CanStart.NEVER:
        return "never, as it stands"
    expected = (
        f"expected at {_local(waiting.estimated_start)}" if waiting.estimated_start else "Slurm expects no time yet"
    )
    if waiting.can_start is CanStart.UNKNOWN:
        return f"unknown; {expected}"
    if waiting.not_before is not None:
        return f"not before {_local(waiting.not_before)}"
    return f"{'it will' if waiting.can_start is CanStart.YES else 'not before that has changed'}; {expected}"


def _event_in_words(event: dict[str, Any]) -> str:
    details = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("attempt", "time", "event"))
    return f"{_local(event['time'])} {event['event']} {details}".strip()


def _local(moment: str) -> str:
    """A UTC time as the reader's clock shows it; the day only when it is not today's."""
    then = datetime.fromisoformat(moment).astimezone()
    today = then.date() == datetime.now(UTC).astimezone().date()
    return f"{then:%H:%M:%S}" if today else f"{then:%Y-%m-%d %H:%M:%S}"


def quote_file(run: RunDirectory, path: Path, line: str) -> Evidence:
    """A line of one of the run's files."""
    whole = run.whole.path
    return Evidence(str(path.relative_to(whole)) if path.is_relative_to(whole) else str(path), clean(line))
