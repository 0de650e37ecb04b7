"""Explain a Slurm job that toolkit did not submit: from squeue, scontrol, sacct and the last lines of its log."""

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError
from toolkit.rundir.find import parse_run_name
from toolkit.rundir.states import RunState
from toolkit.rundir.tail import last_lines
from toolkit.runs.explain.ended import cancelled_by
from toolkit.runs.explain.explain import body_of
from toolkit.runs.explain.model import Evidence, Explanation
from toolkit.runs.explain.waiting import explain_pending
from toolkit.runs.status.state_table import state_phrase
from toolkit.runs.status.unknown_names import slurm_here
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import JobFacts, base_state, run_state
from toolkit.slurm.records import named, show_fields, with_cluster_option
from toolkit.supervise.error_lines import error_line
from toolkit.supervise.symptoms import match_symptom
from toolkit.terminal.talk import clean

__all__ = ["ForeignJob", "explain_job"]

LINES_READ, LAST_LINES, LINES_SHOWN = 5000, 40, 4
# For each final state of Slurm: the symptom, what happened, and what to change before `sbatch` again.
_ENDS = {
    "COMPLETED": ("completed", "its script exited with 0", ""),
    "TIMEOUT": ("walltime", "it reached its walltime", "a longer -t"),
    "DEADLINE": ("walltime", "it reached its --deadline", "a later --deadline"),
    "OUT_OF_MEMORY": ("out_of_memory", "it used more memory than was allocated to it", "more --mem"),
    "NODE_FAIL": ("node_lost", "a node failed", ""),
    "BOOT_FAIL": ("node_lost", "a node did not boot", ""),
    "PREEMPTED": ("preempted", "Slurm preempted it", "--requeue"),
}


@dataclass(frozen=True)
class ForeignJob:
    """A job without a run directory, and its explanation."""

    facts: JobFacts
    name: str
    explanation: Explanation

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `explain --json` for a job that has no run."""
        job, value = self.facts, asdict(self.explanation)
        return value | {"job_id": named(job.job_id, job.cluster), "job_name": self.name, "run_id": "", "status": None,
                        "state": run_state(job.state).value}  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the lines of the explanation, as for a run."""
        job = self.facts
        state = state_phrase(run_state(job.state))
        yield f"{clean(self.name)} (job {named(job.job_id, job.cluster)}) {state}, not submitted by toolkit"
        yield from body_of(self.explanation)


def explain_job(name: str, *, is_queued: bool = False) -> ForeignJob | None:
    """Explain the job of a Slurm job id; None if `name` is not a job id, or Slurm does not respond.

    Raises:
        NotFoundError: Slurm does not know the job, and the caller has not found it in the queue.
    """
    parts = parse_run_name(name)
    slurm = slurm_here(parts.cluster) if parts is not None and parts.job_id else None
    if parts is None or slurm is None:
        return None
    job_id = parts.job_id if parts.task is None else f"{parts.job_id}_{parts.task}"
    try:
        job = slurm.jobs([job_id]).get(job_id)
    except NotFoundError:
        return None
    if job is None or not job.state:
        if is_queued:
            return None
        raise NotFoundError(
            f"Slurm does not know job {job_id}, and no run has it", where="squeue and sacct",
            fix="`squeue --me` and `sacct` list your jobs, `toolkit history` your runs",
        )  # fmt: skip
    if job.comment.startswith("toolkit:"):  # its run is in another folder
        return None
    shown = _shown(slurm, job)
    is_pending = run_state(job.state) is RunState.PENDING
    explanation = explain_pending(slurm, None, job) if is_pending else _explain(slurm, job, shown)
    return ForeignJob(job, shown.get("JobName", "?"), explanation)


def _shown(slurm: Slurm, job: JobFacts) -> dict[str, str]:
    """Return what scontrol shows of a job, or sacct of a job that Slurm has forgotten, by scontrol's names."""
    try:
        blocks, _ = show_fields(slurm.call(["scontrol", "--oneliner", "show", "job", job.job_id]), "JobId")
        of_state = (one for one in blocks if one.get("JobState") == base_state(job.state))  # of the tasks of an array
        return next(of_state, blocks[0]).values
    except (NotFoundError, SchedulerRefusedError, CheckFailedError):
        form = "--format=JobName,ExitCode,WorkDir"
    try:
        rows = slurm.call(["sacct", "--noheader", "--parsable2", "--allocations", form, f"--jobs={job.job_id}"])
    except (NotFoundError, SchedulerRefusedError):
        return {}
    found = dict(zip(("JobName", "ExitCode", "WorkDir"), rows.strip().rpartition("\n")[2].split("|"), strict=False))
    # The default; sacct does not know the value of -o.
    return found | {"StdOut": f"{found.get('WorkDir', '')}/slurm-{job.job_id}.out"}


def _lines_of(log: Path) -> tuple[list[str], str]:
    """Return the last lines of a log that are not empty, none of a device or a pipe; and why it cannot be read."""
    try:
        if not stat.S_ISREG(log.stat().st_mode):
            return [], ""
        return [line for line in last_lines(log, LINES_READ, shown=str, unfinished=True).lines if line.strip()], ""
    except OSError as error:  # the log is on another file system, or Slurm has not created it
        return [], f"this host cannot read it: {error.strerror}"


def _explain(slurm: Slurm, job: JobFacts, shown: dict[str, str]) -> Explanation:
    state, log = base_state(job.state), Path(shown.get("StdOut") or os.devnull)  # jobs of srun and salloc have no log
    errors = Path(shown.get("StdErr") or log)
    lines, unread = _lines_of(log)
    of_errors, errors_unread = ([], "") if errors == log else _lines_of(errors)
    lines += of_errors
    match, cause = match_symptom(lines[-LAST_LINES:]), error_line(lines)
    codes = f"ExitCode={shown.get('ExitCode', '?')}"
    evidence = [Evidence(job.source, " ".join(filter(None, [job.job_id, job.state, job.reason, codes])))]
    is_failure = (
        state not in ("COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED") and run_state(job.state).final
    )
    quoted = [cause.line] if is_failure and cause and match is None else lines[-LINES_SHOWN:]
    quoted = [match.line, *quoted] if match is not None and match.line not in map(str.strip, quoted) else quoted
    evidence += [Evidence(str(errors if line in of_errors else log), clean(line)) for line in quoted]
    evidence += [Evidence(str(path), why) for path, why in ((log, unread), (errors, errors_unread)) if why]
    if not run_state(job.state).final:
        why = f"it runs on {job.nodes or 'its nodes'} for {shown.get('RunTime', '?')} of {job.time_limit or '?'}"
        follows = f"it ends at {job.end_time or 'an unknown time'} at the latest"
        actions = [f"`tail -f {shlex.quote(str(log))}`"] if log.is_file() else []
        actions.append(with_cluster_option(f"`scancel {job.job_id}` ends it", job.cluster))
        why += f"; its log reports that {match.symptom.means}" if match is not None else ""
        return Explanation(match.symptom.word if match else "running", why, follows, actions, evidence)
    symptom, why, change = _ENDS.get(state, ("exit_code", f"Slurm reports {state}", ""))
    if state == "CANCELLED":
        accounted = slurm.accounted([job.job_id]).get(job.job_id)
        who = cancelled_by(accounted) if accounted is not None else ""
        symptom, why = "cancelled", f"{who} cancelled it" if who else "it was cancelled; Slurm does not report by whom"
    elif state == "FAILED":
        code, _, number = (shown.get("ExitCode") or job.exit_code).partition(":")
        symptom = "killed" if number not in ("", "0") else "exit_code"
        why = (
            f"its script was killed by signal {number}"
            if symptom == "killed"
            else f"its script exited with code {code}"
        )
    if match is not None and state not in ("COMPLETED", "CANCELLED", "TIMEOUT"):
        symptom, why = match.symptom.word, f"{match.symptom.means}: {match.line}"
    elif is_failure and cause:
        why += f": {clean(str(cause))}"
    script = shown.get("Command", "")
    again = shlex.quote(script) if Path(script).is_file() else "SCRIPT"
    actions = [f"`toolkit submit {again}`" + (f" with {change}" if change else "") + " also restarts and explains it"]
    return Explanation(symptom, why, "", [] if state == "COMPLETED" else actions, evidence)
