"""Explain a run that is neither queued nor ended, with its earlier attempts."""

import shlex
import time
from datetime import datetime

from toolkit.errors import counted
from toolkit.metrics.verdicts import VerdictKind
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord, reason_of
from toolkit.rundir.files import read_lines, utc_of
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause, RunState
from toolkit.runs.explain.ended import match_log
from toolkit.runs.explain.model import Evidence, Explanation, cause_in_words, quote_file
from toolkit.runs.logs.job_log import job_log
from toolkit.runs.record.job import recorded_job, uses_slurm
from toolkit.runs.requests.control import requeue_asked_at
from toolkit.runs.status.restarts import FOLLOWS
from toolkit.runs.status.state import host_of_local_run
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.verdicts import raised_verdicts
from toolkit.supervise.launch import is_unmanaged
from toolkit.supervise.rank_evidence import HANGS, complete_fix, find_in_ranks

QUIET_S = 60.0  # a step that takes longer is reported


def explain_unfinished(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain a run that is created, running, being cancelled, or unknown."""
    if status.state is RunState.CREATED:
        shell = "sbatch" if uses_slurm(recorded_job(run)) else "bash"
        return Explanation(
            "not_submitted", "it was rendered, but not submitted",
            actions=[f"`{shell} {shlex.quote(str(run.script(0)))}`"],
        )  # fmt: skip
    if status.state is RunState.UNKNOWN:
        return _unknown(run, status)
    if status.state is RunState.CANCELLING:
        return Explanation(
            "cancelling", "a cancel was requested; its ranks save and exit", evidence=[Evidence(status.source, status.reason)],
            follows="it ends by itself, at the latest when Slurm kills it", actions=[f"`toolkit wait {run.run_id}`"],
        )  # fmt: skip
    return _running(run)


def _unknown(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain a run whose state is unknown, with what the end of its log shows."""
    log = job_log(run, status.job_id) if status.job_id else None
    files = (log.readable, log.errors) if log is not None else ()
    seen, line, source = match_log(*files, attempt=run.last_attempt())
    why = f"{status.reason}; its log reports that {seen.symptom.means}" if seen is not None else status.reason
    return Explanation(
        "no_answer", why, follows="unknown", actions=[_who_knows(run, status)],
        evidence=[quote_file(run, source, line)] if source is not None and line else [],
    )  # fmt: skip


def _who_knows(run: RunDirectory, status: RunStatus) -> str:
    """Return how to learn the state: later, or on the host of a run without a scheduler."""
    if not status.job_id.startswith("local-"):
        return "retry later"
    return f"on {host_of_local_run(run)}: `toolkit explain {run.run_id}`"


def _running(run: RunDirectory) -> Explanation:
    attempt = run.last_attempt()
    actions = [
        f"`toolkit logs {run.run_id} -f`",
        f"`toolkit rehearse {run.run_id} preempt` tests whether it would survive a preemption",
    ]
    if attempt is None:
        return Explanation("starting", "the supervisor is starting", follows="it starts the ranks", actions=actions[:1])
    if attempt.exit_file.exists():
        return between_attempts(run, attempt)
    if (stopping := _stopping(run, attempt)) is not None:
        return stopping
    before = _earlier_ends(run, attempt)
    begun = StartRecord.read(attempt)
    wanted = begun.ranks if begun is not None else 0
    here = sum(1 for _ in attempt.ranks.glob("rank-*.json"))
    silent_s = _silent_s(attempt)
    job = recorded_job(run)
    stall_s = job.restart.stall_s
    is_read = bool(job.observe.step_line)
    may_stall = is_read or not is_unmanaged(job.job.entry) or job.origin("restart.stall_s").layer != "built-in"
    pause = ", or ten times the longest pause if that is longer," if is_read else ""
    stalls = f"after {stall_s} s without a step (restart.stall_s){pause} the supervisor ends the attempt as stalled"
    follows = "it continues to its last step" + (", unless it fails as before" if before else "")
    raised = {verdict.kind: verdict for verdict in reversed(raised_verdicts(run))}
    stall, not_finite = raised.get(VerdictKind.STALL), raised.get(VerdictKind.LOSS_NOT_FINITE)
    if silent_s is None:
        why = f"attempt {attempt.number} has begun: {here} of {wanted} ranks have started, and no step has been reported yet"
        if here == wanted and is_unmanaged(job.job.entry):
            why = f"attempt {attempt.number} is running with {counted(wanted, 'rank')}; no step has been read or reported (observe.step_line, toolkit.step)"
        actions = actions[:1]
        why = f"{why}: {waits}" if here == 0 and (waits := _why_it_waits(attempt)) else why
    elif stall is not None:  # it names the rank that the others wait for
        why = f"attempt {attempt.number} with {counted(wanted, 'rank')} is stalled: {stall.message}"
        actions = [f"`toolkit stacks {run.run_id}` shows where each rank waits", *actions[:1]]
        follows = stalls if may_stall else follows
    elif silent_s > QUIET_S and not may_stall:
        why = f"attempt {attempt.number} with {counted(wanted, 'rank')} has reported no step for {silent_s:.0f} s"
    elif silent_s > QUIET_S:
        why = f"attempt {attempt.number} with {counted(wanted, 'rank')} has completed no step for {silent_s:.0f} s"
        follows = stalls
    else:
        why = f"attempt {attempt.number} with {counted(wanted, 'rank')} is making steps, the last one {silent_s:.0f} s ago"
    if not_finite is not None:
        why, follows = (
            f"{why}, but {not_finite.message}",
            "it continues, although nothing is learned from a loss that is not finite",
        )
        actions = [
            f"`toolkit stop {run.run_id}`, then resume from a checkpoint before step {not_finite.first_step}",
            actions[0],
        ]
    hang = find_in_ranks(attempt, HANGS) if silent_s is None or silent_s > QUIET_S else None
    if hang is None:
        return Explanation("running", why, follows=follows, evidence=before, actions=actions)
    return Explanation(
        hang.symptom.word, f"{why}: {hang.symptom.means}", follows=follows, rank=hang.rank,
        evidence=[quote_file(run, attempt.path / hang.file, hang.line), *before],
        actions=[complete_fix(hang.symptom, attempt), *actions],
    )  # fmt: skip


def _stopping(run: RunDirectory, attempt: AttemptDirectory) -> Explanation | None:
    """Explain an attempt whose ranks have been asked to stop and have not all exited; None for any other."""
    requests = [line for line in read_lines(attempt.events) if line.get("event") == "stop_requested"]
    if not requests:
        return None
    last = requests[-1]
    killed_at = utc_of(datetime.fromisoformat(last["time"]).timestamp() + last["seconds"])
    actions = [f"`toolkit logs {run.run_id} -f`"]
    if last["cause"] == Cause.STOPPED:
        actions.append(f"`toolkit stop {run.run_id}` again kills its ranks at once")
    return Explanation(
        "stopping", f"its ranks were asked to save and exit ({last['cause']}) at {last['time']}",
        follows=f"it ends once they have exited; ranks that have not by {killed_at} are killed",
        evidence=[quote_file(run, attempt.events, f"stop_requested: {last['cause']}, {last['seconds']} s")],
        actions=actions,
    )  # fmt: skip


def between_attempts(run: RunDirectory, attempt: AttemptDirectory) -> Explanation:
    """Explain a run between two attempts, which belong to the same start or to two starts."""
    end = AttemptRecord.read(attempt)
    assert end is not None  # the caller has read the file
    return Explanation(
        end.symptom or end.cause.value, cause_in_words(attempt, end),
        follows=f"{FOLLOWS.get(end.next, 'it ends')} ({end.decision})",
        evidence=_earlier_ends(run, attempt), rank=end.rank, host=end.host,
        actions=[f"`toolkit logs {run.run_id} -f`"],
    )  # fmt: skip


def _why_it_waits(attempt: AttemptDirectory) -> str:
    """Return the reason that the supervisor recorded for a launcher that has not started a rank; "" for none."""
    reasons = [str(line["reason"]) for line in read_lines(attempt.events) if line.get("event") == "waiting"]
    return reasons[-1] if reasons else ""


def _silent_s(attempt: AttemptDirectory) -> float | None:
    try:
        return max(0.0, time.time() - attempt.heartbeat.stat().st_mtime)
    except FileNotFoundError:
        return None


def _earlier_ends(run: RunDirectory, last: AttemptDirectory) -> list[Evidence]:
    """Return the ends of the newest two attempts before the last one."""
    ends = []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        end = AttemptRecord.read(attempt)
        if number < last.number and end is not None:
            step = f" at step {end.step}" if end.step is not None else ""
            explanation = cause_in_words(attempt, end) if requeue_asked_at(attempt, end) else reason_of(attempt, end)
            ends.append(quote_file(run, attempt.exit_file, f"{end.cause}{step}: {explanation}"))
    return ends[-2:]
