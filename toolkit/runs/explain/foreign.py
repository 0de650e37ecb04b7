"""Explain a Slurm job that toolkit did not submit: from squeue, scontrol, sacct and the last lines of its log."""

import re
import shlex
from collections.abc import Iterator, Sequence
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
from toolkit.supervise.symptoms import SymptomMatch, match_symptom
from toolkit.terminal.talk import clean

__all__ = ["ForeignJob", "explain_job"]

LINES_READ = 40
LINES_SHOWN = 4
_RESUBMIT = "submit its script again with `sbatch`"
# For each final state of Slurm: the symptom, what happened, and what to do.
_ENDS = {
    "COMPLETED": ("completed", "its script exited with 0", ""),
    "TIMEOUT": ("walltime", "it reached its walltime", f"{_RESUBMIT} and a longer -t"),
    "DEADLINE": ("walltime", "it reached its --deadline", f"{_RESUBMIT} and a later --deadline"),
    "OUT_OF_MEMORY": ("out_of_memory", "it used more memory than was allocated to it", f"{_RESUBMIT} and more --mem"),
    "NODE_FAIL": ("node_lost", "a node failed", _RESUBMIT),
    "BOOT_FAIL": ("node_lost", "a node did not boot", _RESUBMIT),
    "PREEMPTED": ("preempted", "Slurm preempted it", f"{_RESUBMIT} and --requeue"),
}


@dataclass(frozen=True)
class ForeignJob:
    """A job without a run directory, and its explanation."""

    facts: JobFacts
    name: str
    explanation: Explanation

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `explain --json` for a job that has no run."""
        value = asdict(self.explanation) | {"run_id": "", "status": None}
        return {"job_id": named(self.facts.job_id, self.facts.cluster), "job_name": self.name, **value,
                "state": run_state(self.facts.state).value}  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the lines of the explanation, as for a run."""
        job = named(self.facts.job_id, self.facts.cluster)
        yield f"{clean(self.name)} (job {job}) {state_phrase(run_state(self.facts.state))}, not submitted by toolkit"
        yield from body_of(self.explanation)


def explain_job(name: str) -> ForeignJob | None:
    """Explain the job of a Slurm job id; None if `name` is not a job id, or Slurm does not know the job."""
    parts = parse_run_name(name)
    slurm = slurm_here(parts.cluster) if parts is not None and parts.job_id else None
    if parts is None or slurm is None:
        return None
    job_id = parts.job_id if parts.task is None else f"{parts.job_id}_{parts.task}"
    try:
        facts = slurm.jobs([job_id]).get(job_id)
    except NotFoundError:
        return None
    if facts is None or not facts.state or facts.comment.startswith("toolkit:"):  # its run is in another folder
        return None
    shown = _shown(slurm, facts)
    return ForeignJob(facts, shown.get("JobName", "?"), _explain(slurm, facts, shown))


def _shown(slurm: Slurm, job: JobFacts) -> dict[str, str]:
    """Return what scontrol shows of a job, or sacct of a job that Slurm has forgotten, by scontrol's names."""
    try:
        blocks, _ = show_fields(slurm.call(["scontrol", "--oneliner", "show", "job", job.job_id]), "JobId")
        of_state = (one for one in blocks if one.get("JobState") == base_state(job.state))  # of the tasks of an array
        return next(of_state, blocks[0]).values
    except (NotFoundError, SchedulerRefusedError, CheckFailedError):
        pass
    fields = ["JobName", "ExitCode", "WorkDir"]
    argv = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--format={','.join(fields)}",
        f"--jobs={job.job_id}",
    ]
    try:
        lines = slurm.call(argv).splitlines()
    except (NotFoundError, SchedulerRefusedError):
        return {}
    found = dict(zip(fields, lines[-1].split("|"), strict=False)) if lines else {}
    if found.get("WorkDir"):
        found["StdOut"] = f"{found['WorkDir']}/slurm-{job.job_id}.out"  # the default; sacct does not know the others
    return found


def _explain(slurm: Slurm, job: JobFacts, shown: dict[str, str]) -> Explanation:
    state = run_state(job.state)
    if state is RunState.PENDING:
        return explain_pending(slurm, None, job)
    log = Path(shown.get("StdOut", ""))
    lines = _last_lines(log)
    match = match_symptom(lines)
    evidence = [Evidence("squeue" if job.source == "squeue" else "sacct", _state_line(job, shown))]
    quoted = (
        lines[-LINES_SHOWN:]
        if match is None or match.line in lines[-LINES_SHOWN:]
        else [match.line, *lines[-LINES_SHOWN:]]
    )
    evidence += [Evidence(str(log), clean(line)) for line in quoted]
    if not lines and log.name:
        evidence.append(
            Evidence(str(log), "this host cannot read the log" if not log.is_file() else "the log is empty")
        )
    if not state.final:
        return _running(job, shown, evidence, log, match)
    return _ended(slurm, job, shown, evidence, match)


def _last_lines(log: Path) -> list[str]:
    try:
        return [line for line in last_lines(log, LINES_READ, shown=str, unfinished=True).lines if line.strip()]
    except OSError:  # the log is on another file system, or Slurm has not created it
        return []


def _state_line(job: JobFacts, shown: dict[str, str]) -> str:
    return " ".join(filter(None, [job.job_id, job.state, job.reason, f"ExitCode={shown.get('ExitCode', '?')}"]))


def _running(
    job: JobFacts, shown: dict[str, str], evidence: Sequence[Evidence], log: Path, match: SymptomMatch | None
) -> Explanation:
    why = f"it runs on {job.nodes or 'its nodes'} for {shown.get('RunTime', '?')} of {job.time_limit or '?'}"
    if job.state == "COMPLETING":
        why = "its script has ended, and Slurm is cleaning up its nodes"
    if match is not None:
        why += f"; its log reports that {match.symptom.means}"
    actions = [f"`tail -f {shlex.quote(str(log))}` follows its log"] if log.is_file() else []
    return Explanation(
        match.symptom.word if match else "running", why, follows=f"it ends at {job.end_time or 'an unknown time'} at the latest",
        evidence=[*evidence], actions=[*actions, _on(job, f"`scancel {job.job_id}` ends it")],
    )  # fmt: skip


def _ended(
    slurm: Slurm, job: JobFacts, shown: dict[str, str], evidence: Sequence[Evidence], match: SymptomMatch | None
) -> Explanation:
    state = base_state(job.state)
    symptom, why, action = _ENDS.get(state, ("exit_code", f"Slurm reports {state}", ""))
    if state == "CANCELLED":
        symptom, why = _cancelled(slurm, job)
    elif state == "FAILED":
        symptom, why = _failed(shown.get("ExitCode") or job.exit_code)
    if match is not None and state not in ("COMPLETED", "CANCELLED", "TIMEOUT"):
        symptom, why = match.symptom.word, f"{match.symptom.means}: {match.line}"
        action = action or ("" if "toolkit" in match.symptom.fix else match.symptom.fix)
    command = shown.get("Command", "")
    script = command if Path(command).is_file() else "job.sh"
    ours = [] if state == "COMPLETED" else [f"`toolkit submit {shlex.quote(script)}` also restarts and explains it"]
    return Explanation(symptom, why, evidence=[*evidence], actions=[*([action] if action else []), *ours])


def _cancelled(slurm: Slurm, job: JobFacts) -> tuple[str, str]:
    facts = slurm.accounted([job.job_id]).get(job.job_id)
    who = cancelled_by(facts) if facts is not None else ""
    return (
        ("cancelled", f"{who} cancelled it")
        if who
        else ("cancelled", "it was cancelled; Slurm does not report by whom")
    )


def _failed(exit_code: str) -> tuple[str, str]:
    """Return the symptom and the meaning of `code:signal`."""
    match = re.fullmatch(r"(\d+):(\d+)", exit_code)
    if match is None:
        return "exit_code", "Slurm reports a failure without an exit code"
    if int(match[2]):
        return "killed", f"its script was killed by signal {match[2]}"
    return "exit_code", f"its script exited with code {match[1]}"


def _on(job: JobFacts, action: str) -> str:
    return with_cluster_option(action, job.cluster)
