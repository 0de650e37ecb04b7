"""Explain why a run ended: from its own record, or without one from Slurm and the job log."""

import os
import pwd
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import NotFoundError, SchedulerRefusedError, counted
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import tail_text, why_full
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.rank_logs import find_log
from toolkit.rundir.states import ENDINGS, Cause, RunState
from toolkit.runs.explain.model import Evidence, Explanation, cause_in_words, quote_file
from toolkit.runs.logs.job_log import JobLog, job_log, last_life_begun, of_last_life, own_job_id
from toolkit.runs.record.job import recorded_job, slurm_of, uses_slurm
from toolkit.runs.status.state_table import RunStatus
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import JobFacts, base_state
from toolkit.slurm.limits import UnusableNode, unusable_nodes
from toolkit.supervise.error_lines import error_line
from toolkit.supervise.launch import is_unmanaged
from toolkit.supervise.rank_evidence import HANGS, complete_fix, find_in_ranks
from toolkit.supervise.symptoms import OUT_OF_MEMORY, Symptom, SymptomMatch, match_symptom, symptom_named
from toolkit.terminal.talk import clean

LINES_SHOWN = 4
_ENDED = re.compile(r"^toolkit: attempt (\d+) ended: ")
LOG_LINES = 40

_TELL_LAST_LINES = (
    "exception",
    "exit_code",
    "killed",
    "native_crash",
    "peer_lost",
    "collective_timeout",
    "environment",
    "stalled",
)


# Ends of attempts in which a rank may have waited until the end.
_ENDS_OF_HANGS = (Cause.WALLTIME, Cause.STOPPED, Cause.PREEMPTED)


def explain_ended(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain a run that does not continue by itself."""
    attempt = run.last_attempt()
    end = AttemptRecord.read(attempt) if attempt is not None else None
    if status.source == "exit.json" and attempt is not None and end is not None:
        return _by_record(run, status, attempt, end)
    return _without_record(run, status)


def _by_record(run: RunDirectory, status: RunStatus, attempt: AttemptDirectory, end: AttemptRecord) -> Explanation:
    """Explain the end from the supervisor's record."""
    symptom, fix, rank = end.symptom or end.cause.value, end.fix, end.rank
    if end.cause is Cause.CANCELLED:
        return _cancelled(run, status)
    why = cause_in_words(attempt, end)
    begun = StartRecord.read(attempt)
    if begun is not None and begun.halvings:
        why += f" (after {counted(begun.halvings, 'halving')} of the micro-batch, for memory)"
    evidence = [
        Evidence(file, line) if file == "sacct" else quote_file(run, attempt.path / file, line)
        for file, line in end.evidence
    ]
    hang = find_in_ranks(attempt, HANGS) if end.step is None and end.cause in _ENDS_OF_HANGS else None
    if hang is not None:
        why, symptom, rank = f"{why}; {hang.symptom.means}", hang.symptom.word, hang.rank
        evidence, fix = [quote_file(run, attempt.path / hang.file, hang.line)], complete_fix(hang.symptom, attempt)
    elif symptom in _TELL_LAST_LINES or not evidence:
        evidence += _last_lines(run, attempt, end, [why, *(quoted.line for quoted in evidence)])
    spent = end.decision if ENDINGS[end.cause].budget else ""
    return Explanation(
        symptom, why, follows=f"nothing by itself ({spent})" if spent else "", evidence=evidence,
        actions=_next_steps(run, status, fix, symptom, rank), rank=rank, host=end.host,
    )  # fmt: skip


def _last_lines(run: RunDirectory, attempt: AttemptDirectory, end: AttemptRecord, quoted: list[str]) -> list[Evidence]:
    """Return the last lines of the rank that caused the end, or of the launcher, without those in `quoted`."""
    is_of_launcher = end.rank is None and not attempt.run.batch_script.exists()
    path = attempt.launcher_log if is_of_launcher else find_log(attempt, end.rank or 0)
    if end.cause is Cause.STALLED:
        path = attempt.errors  # the place of each rank, from its stack
    new = [line for line in end.last_lines if line.strip(" ^~") and not any(line.strip() in one for one in quoted)]
    return [quote_file(run, path, line) for line in new[-LINES_SHOWN:]]


def _next_steps(
    run: RunDirectory, status: RunStatus, fix: str = "", cause: str = "", rank: int | None = None
) -> list[str]:
    """Return the fix, how to inspect the cause, and how to resume from the newest checkpoint."""
    if status.state is RunState.COMPLETED:
        listed = [f"`toolkit ckpt ls {run.run_id}` lists its checkpoints"] if run.committed_checkpoints() else []
        return [*([fix] if fix else []), *listed, *_with_more_patience(run, status)]
    steps = [fix] if fix else []
    if rank is not None:
        steps.append(f"`toolkit logs {run.run_id} --rank {rank}` shows all output of this rank")
    elif run.batch_script.exists() and run.attempt_numbers():
        steps.append(f"`toolkit logs {run.run_id}` shows all output of the script")
    if f"toolkit resume {run.run_id}" not in fix:
        newest = _newest_checkpoint(run)
        begin = f"continues from {newest}" if newest else "starts from the beginning: there is no checkpoint"
        if not run.start_numbers():
            begin = "submits it again: it has never started"
        elif not newest and is_unmanaged((job := recorded_job(run)).job.entry):
            restores = "; the script must restore any state that it saved itself"
            begin = (
                f"starts it again{', with restart.argv once it has made progress' if job.restart.argv else restores}"
            )
        symptom = symptom_named(cause)
        fixed = "once that is fixed, " if symptom is not None and symptom.lasting else ""
        steps.append(f"{fixed}`toolkit resume {run.run_id}` {begin}")
    return steps


def _with_more_patience(run: RunDirectory, status: RunStatus) -> list[str]:
    """Return how to continue a run that stopped early."""
    patience = recorded_job(run).train.early_stop_patience
    if status.stopped_early and patience:
        more = f"--set train.early_stop_patience={2 * patience}"
        return [f"`toolkit resume {run.run_id} {more}` continues with more patience"]
    return []


def _newest_checkpoint(run: RunDirectory) -> str:
    return max((path.name for path in run.committed_checkpoints()), default="")


def _cancelled(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain who cancelled a run, from the file of `toolkit cancel`, the log, or Slurm's accounting."""
    if run.is_asked("cancel"):
        # A request to a whole array applies to its tasks.
        asked = next(path for part in (run, run.whole) if (path := part.control / "cancel").exists())
        line = asked.read_text(encoding="utf-8").strip()
        moment, _, how = line.partition(" ")
        return Explanation(
            "cancelled", f"requested {how or 'with `toolkit cancel`'} at {moment}",
            evidence=[quote_file(run, asked, line)], actions=_next_steps(run, status),
        )  # fmt: skip
    job = _ask(run, status)
    left = _traces(run, status, job)
    # With OverMemoryKill, slurmd cancels the job.
    if left.seen is OUT_OF_MEMORY and "exceeded" in left.evidence[-1].line.lower():
        return left.tell_seen(OUT_OF_MEMORY)
    if job is not None and (who := cancelled_by(job)):
        why = f"{who} cancelled it with scancel, not with `toolkit cancel`"
    else:
        why = "scancel or an administrator cancelled it, not `toolkit cancel`; only Slurm's accounting could name the user"
    evidence = [Evidence(job.source, _as_line(job))] if job is not None else []
    return Explanation("cancelled_by_other", why, evidence=evidence, actions=_next_steps(run, status))


def cancelled_by(job: JobFacts) -> str:
    """Return the user who cancelled a job, as the subject of a sentence; "" if unknown."""
    if job.cancelled_by is None:
        return ""
    return "you" if job.cancelled_by == os.getuid() else f"user {_user_name(job.cancelled_by)}"


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"with uid {uid}"


def _ask(run: RunDirectory, status: RunStatus) -> JobFacts | None:
    job = recorded_job(run)
    if not uses_slurm(job) or status.job_id.startswith("local-") or not status.job_id:
        return None
    slurm = slurm_of(job)
    try:
        known = slurm.jobs([status.job_id]).get(status.job_id)
    except (NotFoundError, SchedulerRefusedError):  # the run status already reports this error
        return None
    if known is None:
        return None
    known = replace(known, state=base_state(known.state))
    return _with_canceller(slurm, known) if known.state == "CANCELLED" and known.cancelled_by is None else known


def _with_canceller(slurm: Slurm, job: JobFacts) -> JobFacts:
    """Return the job facts with the user who cancelled the job, if accounting knows the user."""
    try:
        accounted = slurm.accounted([job.job_id]).get(job.job_id)
    except SchedulerRefusedError:
        return job
    if accounted is None or accounted.cancelled_by is None:
        return job
    return replace(job, cancelled_by=accounted.cancelled_by, source="sacct")


def _as_line(job: JobFacts) -> str:
    """Return the job facts as a line to quote."""
    by = f" by {job.cancelled_by}" if job.cancelled_by is not None else ""
    return " ".join(word for word in (job.job_id, job.state + by, job.reason, job.exit_code, job.nodes) if word)


@dataclass(frozen=True)
class _Traces:
    """What remains of a job without a record: Slurm's answer, the log, and the symptom at its end."""

    run: RunDirectory
    status: RunStatus
    job: JobFacts | None
    log: JobLog
    log_file: Path | None  # the log, if it can be read
    seen: Symptom | None
    evidence: list[Evidence]
    starts: int  # number of supervisors that this job has started

    @property
    def claimed(self) -> bool:
        return self.starts > 0

    @property
    def never_began(self) -> bool:
        """Return whether Slurm restarted the job more often than its script ran, according to the log or the claims."""
        if self.job is None or not self.job.restarts:
            return False
        begun = last_life_begun(self.log_file) if self.log_file is not None else self.starts - 1
        return begun is not None and self.job.restarts > begun

    @property
    def steps(self) -> list[str]:
        return _next_steps(self.run, self.status)

    @property
    def attempt(self) -> AttemptDirectory | None:
        """Return the last attempt of this job; None if it has none."""
        attempt = self.run.last_attempt()
        if attempt is None or not self.claimed:
            return None
        begun = StartRecord.read(attempt)
        return attempt if begun is None or begun.job_id == own_job_id(self.run, self.status.job_id) else None

    def tell(self, symptom: str, why: str, *actions: str, more: Sequence[Evidence] = ()) -> Explanation:
        return Explanation(symptom, why, evidence=[*self.evidence, *more], actions=[*actions, *self.steps])

    def tell_seen(self, symptom: Symptom) -> Explanation:
        fix = symptom.fix.format(run=self.run.run_id)
        return Explanation(
            symptom.word, symptom.means, evidence=self.evidence, actions=_next_steps(self.run, self.status, fix)
        )


def _without_record(run: RunDirectory, status: RunStatus) -> Explanation:
    """Explain an end without a final record, from Slurm, the log and the disk."""
    if status.state is RunState.CANCELLED:
        return _cancelled(run, status)
    left = _traces(run, status, _ask(run, status))
    explanation = _by_slurms_word(left, left.job) if left.job is not None else None
    if explanation is None and left.seen is not None:
        explanation = left.tell_seen(left.seen)
    return explanation or _by_silence(left)


def _traces(run: RunDirectory, status: RunStatus, job: JobFacts | None) -> _Traces:
    evidence = [Evidence(job.source, _as_line(job)) if job is not None else Evidence(status.source, _fact_of(status))]
    log = job_log(run, status.job_id)
    file = log.readable
    if not status.job_id:  # the job is unknown, but its log may exist
        file = max(run.whole.path.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime, default=None)
    claims = (read_claim(run, number) for number in run.start_numbers())
    starts = sum(claim is not None and claim.job_id == own_job_id(run, status.job_id) for claim in claims)
    left = _Traces(run, status, job, log, file, None, evidence, starts)
    if left.never_began:
        return left  # the log is from an earlier start of the job
    seen, line, source = match_log(file, log.errors, attempt=run.last_attempt())
    if line and source is not None:
        evidence.append(quote_file(run, source, line))
    return replace(left, seen=seen.symptom if seen is not None else None)


def _fact_of(status: RunStatus) -> str:
    """Return the reason without the fix, which is printed below it."""
    return status.reason.partition("; `toolkit resume`")[0]


def _by_slurms_word(left: _Traces, job: JobFacts) -> Explanation | None:
    """Explain an end from Slurm's state and reason; None if they are not enough."""
    if job.state == "OUT_OF_MEMORY" or job.reason == "OutOfMemory":
        return left.tell_seen(OUT_OF_MEMORY)
    if job.state == "NODE_FAIL" or job.reason == "NodeDown":
        down = _down_now(left.run, job.nodes)
        why = f"{', '.join(node.name for node in down) or 'a node'} of {job.nodes or 'the job'} failed"
        return left.tell(
            "node_lost", why, more=[Evidence("sinfo", f"{node.name} {node.state}: {node.reason}") for node in down]
        )
    if job.state in ("TIMEOUT", "DEADLINE"):
        more = f"`toolkit resume {left.run.run_id} -t TIME` resumes it with a longer time limit"
        return left.tell("walltime", "Slurm ended it at its time limit", more)
    if job.state == "PREEMPTED":
        return left.tell("preempted", "Slurm preempted it")
    if job.state == "BOOT_FAIL":
        return left.tell("node_lost", "its nodes did not boot")
    has_log = left.log_file is not None or left.log.errors is not None
    if job.state == "FAILED" and not has_log and not left.log.redirected and not left.claimed:
        return _never_started(left.run, job, left.evidence)
    if left.never_began:
        return left.tell(
            "never_began", f"Slurm requeued it, but could not start its script again (restart {job.restarts})"
        )
    return None


def _by_silence(left: _Traces) -> Explanation:
    """Explain an end for which neither Slurm nor the log has a reason, from the missing files."""
    run = left.run
    if (full := full_disk(run.whole.path)) is not None:
        why = "the run's file system is full, so that not even the result could be written"
        first, *others = left.steps
        return Explanation(
            "disk_full", why, evidence=[*left.evidence, full], actions=["free space, then " + first, *others]
        )
    if not left.status.job_id and left.log_file is None:
        return left.tell("submission_broken", _fact_of(left.status))
    place = f"option -o placed its log at {left.log.place}"
    elsewhere = [f"{place}; if there is none, Slurm could not open it on the node"] if left.log.redirected else []
    if left.job is None and left.log_file is None and not left.claimed:
        why = "Slurm no longer knows the job, and its supervisor never started: it was cancelled in the queue, or could not start"
        return left.tell("forgotten", why, *elsewhere, f"check that compute nodes see {run.whole.path}")
    attempt = left.attempt
    if attempt is None or (left.job is not None and left.job.state == "FAILED" and attempt.exit_file.exists()):
        return left.tell(
            "supervisor_failed", "the job script or the supervisor failed before a result was written",
            *(elsewhere or [f"`toolkit logs {run.run_id}` shows the error"]),
        )  # fmt: skip
    return left.tell("supervisor_lost", "the supervisor vanished without a result: it was killed, or its host is gone")


def _down_now(run: RunDirectory, nodes: str) -> list[UnusableNode]:
    """Return the nodes of a job that are still down or drained."""
    if not nodes:
        return []
    try:
        return unusable_nodes(slurm_of(recorded_job(run)), nodes=nodes)
    except SchedulerRefusedError:  # the explanation only lacks a detail
        return []


def _never_started(run: RunDirectory, job: JobFacts, evidence: list[Evidence]) -> Explanation:
    """Explain a job whose run directory its node did not have, so toolkit never ran."""
    where = job.nodes or "its node"
    look = f": `srun -w {shlex.quote(job.nodes)} ls -d {shlex.quote(str(run.whole.path))}`" if job.nodes else ""
    return Explanation(
        "no_log_folder",
        f"the run directory did not exist on {where} when Slurm started the job",
        evidence=[*evidence, Evidence("run directory", str(run.whole.path))],
        actions=[
            f"check that the folder is on a file system that {where} sees{look}",
            f"submit it again with --runs on such a file system, or `toolkit resume {run.run_id}` once it is back",
        ],
    )


def full_disk(path: Path) -> Evidence | None:
    """Return the free space of a full file system; None if it is not full."""
    full = why_full(path)
    return Evidence("df", full) if full else None


def reason_in_log(run: RunDirectory, job_id: str) -> Evidence | None:
    """Return the line of a job's files that shows why it ended without a record; None if it left no files."""
    log = job_log(run, job_id)
    _, line, source = match_log(log.readable, log.errors)
    return quote_file(run, source, line) if source is not None else None


def match_log(
    *logs: Path | None, attempt: AttemptDirectory | None = None
) -> tuple[SymptomMatch | None, str, Path | None]:
    """Return the symptom in the files of a job, its line and that file; without one, the fatal or else the last line.

    Lines of attempts before `attempt` are omitted.
    """
    found = [(line, file) for file in logs if file is not None for line in _lines_since(file, attempt)]
    lines = [line for line, _ in found]
    seen, error = match_symptom(lines), error_line(lines)
    line = seen.line if seen is not None else error.line if error is not None else lines[-1] if lines else ""
    return seen, line, next((file for one, file in found if one.strip().startswith(line.strip())), None)


def _lines_since(log: Path, attempt: AttemptDirectory | None) -> list[str]:
    lines = [clean(line) for line in of_last_life(tail_text(log, LOG_LINES)) if line.strip()]
    ends = [(at, int(end[1])) for at, line in enumerate(lines) if (end := _ENDED.match(line))]
    earlier = [at for at, number in ends if attempt is not None and number < attempt.number]
    return lines[earlier[-1] :] if earlier else lines
