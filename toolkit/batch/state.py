"""What state a run is in: its own final word first, then Slurm's, then the process table's. Never a guess."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.batch.settle import last_open_start, open_word, settle
from toolkit.batch.submission import recorded_job, slurm_of, uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.metrics.training import last_record
from toolkit.rundir.claims import StartClaim, read_claim
from toolkit.rundir.files import read_json, read_json_or_none
from toolkit.rundir.find import has_begun, job_ids
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import RunState
from toolkit.slurm.commands import JobFacts
from toolkit.slurm.states import run_state
from toolkit.supervise.allocation import process_start_ticks


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. `reason` says in words what is known; `source` who said it."""

    run_id: str
    job_name: str
    state: RunState
    site: str
    job_id: str
    reason: str
    source: str
    nodes: int | str
    ranks: int
    starts: int
    attempts: int
    step: int | None
    exit_code: int | None
    path: str

    def as_json(self) -> dict[str, Any]:
        """The documented JSON of `status --json`."""
        return {**asdict(self), "state": self.state.value}


# Slurm's facts by job id, or the error where it did not answer.
Answer = Mapping[str, JobFacts] | ToolkitError


def run_status(run: RunDirectory, answer: Answer | None = None, *, echo: bool = False) -> RunStatus:
    """The state of one run. `answer` is Slurm's where it was asked for all runs at once; None asks it now."""
    job = recorded_job(run)
    opened = None
    if last_open_start(run) is not None:
        opened, answer = settle(run, slurm_of(job, echo=echo)), None
    ids = job_ids(run)
    job_id = ids[-1] if ids else ""
    word = open_word(opened, job_id) or final_word(run) or _living_word(run, job_id, answer, echo=echo)
    # The run may have ended between the two looks, and then its own word counts.
    if opened is None and word[0].final:
        word = final_word(run) or word
    state, reason, source = word
    attempt = run.last_attempt()
    end = read_json_or_none(attempt.exit_file) if attempt else None
    nodes, ranks = _shape(run, job)
    return RunStatus(
        run_id=run.run_id, job_name=run.job_name, state=state, site=job.site.name, job_id=job_id, reason=reason,
        source=source, nodes=nodes, ranks=ranks,
        starts=len(run.start_numbers()), attempts=len(run.attempt_numbers()),
        step=_step(run, attempt) if attempt else None,
        exit_code=end["exit_code"] if end and end["final"] and state.final else None, path=str(run.path),
    )  # fmt: skip


def _shape(run: RunDirectory, job: ResolvedJob) -> tuple[int | str, int]:
    """Nodes and ranks: what the last attempt got, as long as no later start was submitted; else what is asked for."""
    attempt = run.last_attempt()
    begun = read_json_or_none(attempt.start_file) if attempt else None
    if begun is not None and begun["start"] >= _last_submitted(run):
        return begun["nodes"], begun["ranks"]
    return job.job.nodes, job.job.min_nodes * job.job.ranks_per_node


def _step(run: RunDirectory, attempt: AttemptDirectory) -> int | None:
    """The last step that anybody wrote down: the heartbeat is at most one a second, and lags behind."""
    beat, end = read_json_or_none(attempt.heartbeat), read_json_or_none(attempt.exit_file)
    record = last_record(run.metrics / "train.jsonl")
    steps = [
        beat["step"] if beat else None,
        end["step"] if end else None,
        record.step if record is not None and record.attempt == attempt.number else None,
    ]
    return max((step for step in steps if step is not None), default=None)


def require_submitted(run: RunDirectory) -> None:
    """Refuse a run that is only rendered: nothing of it will happen by itself.

    Raises:
        CheckFailedError: it was neither submitted nor has it started.
    """
    if not has_begun(run):
        shell = "sbatch" if uses_slurm(recorded_job(run)) else "bash"
        raise CheckFailedError(
            f"run {run.run_id} is rendered, not submitted", fix=f"`{shell} {shlex.quote(str(run.script(0)))}`"
        )


def unreadable(run: RunDirectory, error: ToolkitError) -> RunStatus:
    """The status of a run whose files cannot be read, so that a list of many runs can still show it."""
    return RunStatus(
        run_id=run.run_id, job_name=run.job_name, state=RunState.UNKNOWN, site="", job_id="", reason=str(error),
        source="none", nodes=0, ranks=0, starts=0, attempts=0, step=None, exit_code=None, path=str(run.path),
    )  # fmt: skip


def final_word(run: RunDirectory) -> tuple[RunState, str, str] | None:
    """The last attempt's verdict, when no later start was submitted."""
    attempt = run.last_attempt()
    end = read_json_or_none(attempt.exit_file) if attempt else None
    if attempt is None or end is None or not end["final"]:
        return None
    begun = read_json_or_none(attempt.start_file)
    if begun is None or _last_submitted(run) > begun["start"]:
        return None
    place = f"rank {end['rank']} on {end['host']}: " if end.get("rank") is not None else ""
    return RunState(end["state"]), place + end["reason"], "exit.json"


def _last_submitted(run: RunDirectory) -> int:
    return max((int(path.stem.split("-")[1]) for path in run.path.glob("submitted-*.json")), default=0)


def ask_slurm(job: ResolvedJob, job_ids: list[str], *, echo: bool = False) -> Answer:
    """What the job's cluster says of some jobs; its silence is an answer too."""
    try:
        return slurm_of(job, echo=echo).jobs(job_ids)
    except (SchedulerRefusedError, NotFoundError) as error:
        return error


def _living_word(
    run: RunDirectory, job_id: str, answer: Answer | None, *, echo: bool
) -> tuple[RunState, str, str]:
    if not job_id:
        return RunState.CREATED, "rendered, not submitted", "run directory"
    if job_id.startswith("local-"):
        return _local_word(run, job_id)
    job = recorded_job(run)
    if not uses_slurm(job):
        return RunState.UNKNOWN, f"job {job_id} is not of site {job.site.name}", "run directory"
    known = ask_slurm(job, [job_id], echo=echo) if answer is None else answer
    if isinstance(known, ToolkitError):
        return RunState.UNKNOWN, f"Slurm does not answer: {known.message}", "none"
    fact = known.get(job_id)
    if fact is None:
        lost = f"Slurm does not know job {job_id} any more, and the run left no result"
        return RunState.LOST, lost, "Slurm"
    state = run_state(fact.state)
    claim = _claim_of(run, job_id)
    if state is RunState.RUNNING and claim is not None and _vanished(run, claim):
        # `toolkit run` inside salloc: the allocation lives on, its supervisor does not.
        return RunState.LOST, _gone(claim), "process table"
    reason = f"Slurm: {fact.state}" + (f" ({fact.reason})" if fact.reason not in ("", "None") else "")
    if not state.final and (run.control / "cancel").exists():
        state = RunState.CANCELLING
    elif state is RunState.COMPLETED:  # Slurm's exit code 0 is no done marker
        state, reason = RunState.LOST, reason + ", but the run left no result"
    return state, reason, fact.source


def _vanished(run: RunDirectory, claim: StartClaim) -> bool:
    """The supervisor ran on this host, did not say that it ended, and is gone."""
    ended = (run.start(claim.start) / "end.json").exists()
    return claim.host == socket.gethostname() and not ended and not _alive(claim.pid, claim.process_started)


def _gone(claim: StartClaim) -> str:
    return f"the supervisor (process {claim.pid}) is gone and left no result"


def _local_word(run: RunDirectory, job_id: str) -> tuple[RunState, str, str]:
    """Local runs have no scheduler to ask: only the host that they run on knows whether they live."""
    claim = _claim_of(run, job_id)
    host = claim.host if claim else str(read_json(run.record)["host"])
    if host != socket.gethostname():
        return RunState.UNKNOWN, f"it was started on {host}; ask there", "run directory"
    cancelling = (run.control / "cancel").exists()
    if claim is None:
        if _alive(int(job_id.removeprefix("local-")), None):
            waiting = RunState.CANCELLING if cancelling else RunState.PENDING
            return waiting, "the supervisor is starting", "process table"
        early = "the supervisor ended before it claimed the start; see the run's slurm-local-*.out"
        return RunState.FAILED, early, "process table"
    if not _alive(claim.pid, claim.process_started):
        return RunState.LOST, _gone(claim), "process table"
    if cancelling:
        return RunState.CANCELLING, "cancel was asked", "process table"
    return RunState.RUNNING, f"process {claim.pid} on {claim.host}", "process table"


def _claim_of(run: RunDirectory, job_id: str) -> StartClaim | None:
    for number in reversed(run.start_numbers()):
        claim = read_claim(run, number)
        if claim is not None and claim.job_id == job_id:
            return claim
    return None


def _alive(pid: int, started: int | None) -> bool:
    try:
        ticks = process_start_ticks(pid)
    except ProcessLookupError:
        return False
    return started is None or ticks == started
