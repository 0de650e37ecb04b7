"""The end of an attempt: decide what follows it within the restart budgets of the run, record it, and log it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import OWN_FAILURE, OwnFailureError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.files import append_line, utc_now
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, start_of
from toolkit.rundir.states import ENDINGS, NO_REQUEUE, Cause, EndDecision, Next, decide
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say
from toolkit.supervise.progress import is_import_failure, progress_fix, why_repeated
from toolkit.supervise.retry import Retry
from toolkit.supervise.symptoms import CONTROLLER_AWAY, DISK_FULL, GPU_OUT_OF_MEMORY, OUT_OF_MEMORY, match_symptom

__all__ = ["earlier_ends", "halves_again"]

ENVIRONMENT_FIX = (
    "install the module in the environment of the ranks, or name its module or virtual environment in [env] of the job or "
    "site file; a syntax error needs a fix in that file"
)
MOST_HALVINGS = 3  # of the micro-batch of a run
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
) -> EndDecision:
    """Return the decision on what follows the end of an attempt of `start`.

    Args:
        restart: the job's [restart] table.
        cause: why the attempt ended, according to Slurm; `end.cause` is what the supervisor observed.
        again: how this start may be followed by another one; None if it may not.
        tells_steps: True if the job reports its steps; scripts and executables do not.
        why_last: why `again` is None.
    """
    earlier = earlier_ends(run, start)
    if cause is Cause.CRASHED and is_import_failure(earlier, end):
        cause = Cause.ENVIRONMENT
    repeated = why_repeated(
        earlier, end, cause, tells_steps=tells_steps, blind_requeues=int(restart.get("blind_requeues", 2)),
        continues=bool(restart.get("argv")),
    )  # fmt: skip
    budgets = {key: int(restart[key]) for key in _BUDGETS}
    spent = dict.fromkeys(_BUDGETS, 0)
    for record in earlier:
        budget = ENDINGS[record.cause].budget
        if budget and not _is_halved(restart, record.cause, record.symptom):
            spent[budget] += 1
    is_blind = cause is Cause.WALLTIME and not tells_steps and bool(repeated)
    if is_blind and (again is None or 0 <= budgets["walltimes"] <= spent["walltimes"]):
        repeated, is_blind = "", False  # no progress would bring another start
    is_halved = _is_halved(restart, cause, end.symptom)
    if is_halved:
        repeated = ""
        halved = sum(_is_halved(restart, record.cause, record.symptom) for record in earlier)
        budgets["crashes"], spent["crashes"] = MOST_HALVINGS, halved
    decision = decide(
        cause, budgets=budgets, spent=spent, again=again,
        rank_exit_code=end.exit_code or 1, why_repeated=repeated,
        cannot_pass=end.cannot_pass and end.cause is cause, why_last=why_last,
    )  # fmt: skip
    if cause is Cause.ENVIRONMENT:
        return replace(decision, fix=ENVIRONMENT_FIX)
    if is_halved and decision.next is Next.END:
        return replace(decision, reason=f"memory ran out again after {MOST_HALVINGS} halvings of the micro-batch")
    return replace(decision, fix=progress_fix(earlier, end)) if is_blind else decision


def halvings(run: RunDirectory, start: int, restart: Mapping[str, Any]) -> int:
    """Return how often the next attempt of `start` halves the micro-batch, because earlier ones ran out of memory."""
    if restart.get("out_of_memory") != "smaller_micro_batch":
        return 0
    found = sum(_is_halved(restart, record.cause, record.symptom) for record in earlier_ends(run, start))
    return min(MOST_HALVINGS, found)


def halves_again(restart: Mapping[str, Any], reason: str, halvings: int) -> bool:
    """Return whether the attempt after a crash for this reason halves the micro-batch once more."""
    seen = match_symptom([reason])
    return halvings < MOST_HALVINGS and seen is not None and _is_halved(restart, Cause.CRASHED, seen.symptom.word)


def _is_halved(restart: Mapping[str, Any], cause: Cause, symptom: str) -> bool:
    """Return whether the micro-batch is halved after an attempt that ended like this."""
    is_memory = cause is Cause.CRASHED and symptom in (OUT_OF_MEMORY.word, GPU_OUT_OF_MEMORY.word)
    return is_memory and restart.get("out_of_memory") == "smaller_micro_batch"


def earlier_ends(run: RunDirectory, start: int) -> list[AttemptRecord]:
    """Return the ends of attempts that count against the restart budgets of `start`: those since the last resume.

    Only `toolkit resume` refills the budgets; a requeue or a follow-up job does not.
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
    """Return the end of an attempt that failed before any rank started. A retry helps only if slurmctld was down."""
    seen = match_symptom([error.message])
    is_away = seen is not None and seen.symptom is CONTROLLER_AWAY
    return AttemptEnd(
        Cause.LAUNCH_FAILED, error.message, OWN_FAILURE, fix=error.fix, cannot_pass=not is_away,
        symptom=CONTROLLER_AWAY.word if is_away else "",
    )  # fmt: skip


def without_room(error: OSError, run: RunDirectory) -> AttemptEnd:
    """Return the end of an attempt without disk space for its reserve file: its ranks would lack space, too."""
    reason = f"not enough free space in the run directory to record the end of an attempt: {error.strerror}"
    fix = DISK_FULL.fix.format(run=run.run_id)
    return AttemptEnd(Cause.LAUNCH_FAILED, reason, OWN_FAILURE, fix=fix, symptom=DISK_FULL.word, cannot_pass=True)


def out_of_time(end: AttemptEnd) -> AttemptEnd:
    """Return the end of a start that retried slurmctld almost until its walltime; the next start launches the ranks."""
    reason = f"{CONTROLLER_AWAY.means}; toolkit retried until the walltime was near"
    return replace(end, cause=Cause.WALLTIME, reason=reason, cannot_pass=False)


def end_after_all(attempt: AttemptDirectory, decision: str, **changed: Any) -> None:
    """Record in `exit.json` that no attempt follows this one, although another one was planned."""
    end = AttemptRecord.read(attempt)
    if end is not None:
        end.ending_the_run(decision, **changed).write(attempt)


def record_end(
    attempt: AttemptDirectory, end: AttemptEnd, decision: EndDecision, seconds: float, patience: Retry
) -> None:
    """Write `exit.json`, and print its contents to the job's log."""
    fix = decision.fix or end.fix
    record = AttemptRecord(
        decision.cause, decision.next, decision.next is Next.END, decision.final_state, decision.exit_code, end.reason,
        decision.reason, end.rank, end.host, fix, end.last_lines, end.step, round(seconds, 3), utc_now(),
        symptom=end.symptom if end.symptom and end.cause is decision.cause else decision.cause.value, evidence=end.evidence,
        changed_files=end.changed_files, new_files=end.new_files,
    )  # fmt: skip
    event = {"time": utc_now(), "event": "ended", "cause": decision.cause.value, "next": decision.next.value}
    try:
        patience.wait_for(lambda: record.write(attempt))
        patience.wait_for(lambda: append_line(attempt.events, event))
    except OSError as error:  # a full disk must not keep the run from its next start
        say(f"cannot write {attempt.exit_file}: {error.strerror}; its contents: {json.dumps(record.as_json())}")
    place = f" ({record.culprit})" if record.culprit else ""
    say(f"attempt {attempt.number} ended: {decision.cause.value}{place}: {end.reason}")
    for line in end.last_lines:
        say(f"    | {line}")
    if fix:
        say(f"fix: {fix}")
    if decision.cause is not Cause.COMPLETED:
        say(f"next: {decision.next.value} ({decision.reason})")
