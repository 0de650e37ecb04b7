"""The end of an attempt: what it leads to by the budgets of the run, and how it is written down and told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import OWN_FAILURE, OwnFailureError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.files import append_line, utc_now
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, start_of
from toolkit.rundir.states import ENDINGS, NO_REQUEUE, Cause, Next, Verdict, decide
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say
from toolkit.supervise.patience import Patience
from toolkit.supervise.progress import is_repeated
from toolkit.supervise.symptoms import CONTROLLER_AWAY, DISK_FULL, sight

_BUDGETS = ("crashes", "walltimes", "preemptions")


def judge(
    run: RunDirectory,
    restart: Mapping[str, Any],
    start: int,
    end: AttemptEnd,
    cause: Cause,
    again: Next | None,
    *,
    tells_steps: bool,
    why_last: str = NO_REQUEUE,
) -> Verdict:
    """What the end of an attempt of `start` leads to.

    Args:
        restart: the job's table.
        cause: why it ended, as Slurm says; `end.cause` is what the supervisor saw.
        again: how this start may be followed by another one.
        tells_steps: the job reports its steps; of scripts and executables none are known.
        why_last: why `again` is None.
    """
    earlier = earlier_ends(run, start)
    repeated = is_repeated(earlier, end, cause, tells_steps=tells_steps)
    spent = dict.fromkeys(_BUDGETS, 0)
    for record in earlier:
        budget = ENDINGS[record.cause].budget
        if budget:
            spent[budget] += 1
    return decide(
        cause, budgets={key: int(restart[key]) for key in _BUDGETS}, spent=spent, again=again,
        rank_exit_code=end.exit_code or 1, repeated_without_progress=repeated,
        cannot_pass=end.cannot_pass and end.cause is cause, why_last=why_last,
    )  # fmt: skip


def earlier_ends(run: RunDirectory, start: int) -> list[AttemptRecord]:
    """Ends of attempts that spent from the budgets that `start` has: those since the last resume, which refills them.

    A requeue keeps its job, and a follow-up job continues one; neither begins anew.
    """
    resumed = map(start_of, run.whole.path.glob("resumed-*.json"))
    begins = max((number for number in resumed if number <= start), default=0)
    ends = []
    for attempt in map(run.attempt, run.attempt_numbers()):
        begun, end = StartRecord.read(attempt), AttemptRecord.read(attempt)
        if begun is not None and end is not None and begins <= begun.start <= start:
            ends.append(end)
    return ends


def unlaunched(error: OwnFailureError) -> AttemptEnd:
    """A failure of the supervisor before any rank started: the user must fix it, except if slurmctld did not respond."""
    seen = sight([error.message])
    is_away = seen is not None and seen.symptom is CONTROLLER_AWAY
    return AttemptEnd(
        Cause.LAUNCH_FAILED, error.message, OWN_FAILURE, fix=error.fix, cannot_pass=not is_away,
        symptom=CONTROLLER_AWAY.word if is_away else "",
    )  # fmt: skip


def without_room(error: OSError, run: RunDirectory) -> AttemptEnd:
    """The end of an attempt on a disk that has no room for its reserve: its ranks would only fail of that again."""
    reason = f"there is no room in the run directory to write how an attempt ends: {error.strerror}"
    fix = DISK_FULL.fix.format(run=run.run_id)
    return AttemptEnd(Cause.LAUNCH_FAILED, reason, OWN_FAILURE, fix=fix, symptom=DISK_FULL.word, cannot_pass=True)


def out_of_time(end: AttemptEnd) -> AttemptEnd:
    """The end of a start whose slurmctld did not respond until shortly before its walltime: the next start launches the ranks."""
    reason = f"{CONTROLLER_AWAY.means}, until the walltime was near"
    return replace(end, cause=Cause.WALLTIME, reason=reason, cannot_pass=False)


def end_after_all(attempt: AttemptDirectory, decision: str, **changed: Any) -> None:
    """Record in `exit.json` that no attempt follows this one, although one was planned."""
    end = AttemptRecord.read(attempt)
    if end is not None:
        end.ending_the_run(decision, **changed).write(attempt)


def record_end(
    attempt: AttemptDirectory, end: AttemptEnd, verdict: Verdict, seconds: float, patience: Patience
) -> None:
    """Write `exit.json` and say the same in the job's log."""
    record = AttemptRecord(
        verdict.cause, verdict.next, verdict.next is Next.END, verdict.final_state, verdict.exit_code, end.reason,
        verdict.reason, end.rank, end.host, end.fix, end.last_lines, end.step, round(seconds, 3), utc_now(),
        symptom=end.symptom if end.symptom and end.cause is verdict.cause else verdict.cause.value, evidence=end.evidence,
    )  # fmt: skip
    event = {"time": utc_now(), "event": "ended", "cause": verdict.cause.value, "next": verdict.next.value}
    try:
        patience.wait_for(lambda: record.write(attempt))
        patience.wait_for(lambda: append_line(attempt.events, event))
    except OSError as error:  # a full disk must not keep the run from its next start
        say(f"cannot write {attempt.exit_file}: {error.strerror}; it would say: {json.dumps(record.as_json())}")
    place = f" ({record.culprit})" if record.culprit else ""
    say(f"attempt {attempt.number} ended: {verdict.cause.value}{place}: {end.reason}")
    for line in end.last_lines:
        say(f"    | {line}")
    if end.fix:
        say(f"fix: {end.fix}")
    if verdict.cause is not Cause.COMPLETED:
        say(f"next: {verdict.next.value} ({verdict.reason})")
