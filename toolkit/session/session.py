"""Sessions: named allocations by `salloc --no-shell`, which outlive the terminal."""

import re
import subprocess
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from os import environ as os_environ
from typing import Any

from toolkit.config.layout_checks import refuse_components
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import CheckFailedError, InterruptedWaitError, NotFoundError, SchedulerRefusedError, ToolkitError
from toolkit.rundir.files import open_append, typed_path
from toolkit.rundir.states import RunState
from toolkit.runs.record.job import site_of, slurm_of, uses_slurm
from toolkit.session.files import Session, find_session, new_session, session_file
from toolkit.slurm.commands import NoAnswerError, Slurm
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.job_facts import JobFacts, run_state
from toolkit.slurm.reasons import CanStart, pending_reason
from toolkit.slurm.records import has_no_address
from toolkit.slurm.refusals import refusal_of
from toolkit.slurm.submit import without_job
from toolkit.slurm.times import printed_limit_s
from toolkit.submission.script import allocation_options
from toolkit.terminal.talk import say

__all__ = [
    "SessionState", "await_grant", "check_request", "end_session", "ending_of", "enter", "request_session",
    "running_session", "states_of",
]  # fmt: skip

WARN_S = 600.0
ANSWER_S = 60.0  # timeout for salloc to print its job id
POLL_S = 0.2
QUESTION_PERIOD_S = 5.0  # pause between queries for a pending session
_JOB = re.compile(r"^salloc: (?:Pending|Granted) job allocation (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class SessionState:
    """The state of a session at one moment. `left_s` is None if it is not running or has no time limit."""

    session: Session
    state: RunState
    reason: str
    nodes: list[str]
    left_s: float | None

    @property
    def has_ended(self) -> bool:
        return self.state.final

    @property
    def ends_soon(self) -> bool:
        return self.state is RunState.RUNNING and self.left_s is not None and self.left_s < WARN_S

    def as_json(self) -> dict[str, Any]:
        """Return one entry of `session ls --json`."""
        return {
            "name": self.session.name, "job_id": self.session.job_id, "state": self.state.value, "reason": self.reason,
            "site": self.session.job.site.name, "cluster": self.session.job.job.cluster, "nodes": self.nodes,
            "left_s": self.left_s, "created": self.session.created,
        }  # fmt: skip


def request_session(job: ResolvedJob, name: str) -> tuple[Session, subprocess.Popen[bytes]]:
    """Request an allocation with the nodes of a job; return once the request is in the queue.

    The returned salloc process exits when the allocation is granted.

    Raises:
        SchedulerRefusedError: Slurm rejects the request.
    """
    slurm = slurm_of(job)
    argv = [
        "salloc",
        "--no-shell",
        f"--job-name={job.job.name}",
        f"--comment=toolkit:session:{name}",
        *allocation_options(job),
    ]
    log = session_file(name, "log")
    log.unlink(missing_ok=True)
    process = slurm.begin(argv, base=without_job(os_environ), output=open_append(log))
    deadline = time.monotonic() + ANSWER_S
    try:
        while True:
            ended = process.poll() is not None  # checked before the log is read, so that its last lines are included
            if found := _JOB.search(said := log.read_text(errors="replace")):
                break
            if ended:
                raise _refused(slurm, said, process.returncode)
            if time.monotonic() > deadline:
                raise NoAnswerError(
                    f"salloc did not print a job id within {ANSWER_S:.0f} s",
                    where=str(log),
                    fix="run `scontrol ping` to check whether slurmctld is up",
                )
            time.sleep(POLL_S)
    except BaseException:
        process.terminate()  # salloc then cancels its request
        log.unlink(missing_ok=True)
        raise
    return new_session(name, found[1], job), process


def check_request(job: ResolvedJob, name: str) -> None:
    """Raise an error if a job cannot become a session, before the request to Slurm.

    Raises:
        CheckFailedError: a session of this name exists.
        ToolkitError: the site has no scheduler, or the job is an array or has components.
    """
    _check_job(job)
    _check_free(name)


def _check_job(job: ResolvedJob) -> None:
    if not uses_slurm(job):
        raise ToolkitError(
            f"expected a site with Slurm, got {job.site.name!r}, which has no scheduler",
            where=job.origin("site.name").place("site.name"),
            fix="`toolkit run JOB` runs a job on this host; or choose a cluster with --site",
        )
    refuse_components(job, "a session must consist of one component", "omit the components")
    if job.job.array:
        raise ToolkitError(
            "a session cannot be an array: it is a single allocation",
            where=job.origin("job.array").place("job.array"),
            fix="remove job.array, or override it with --set job.array=",
        )


def _check_free(name: str) -> None:
    try:
        known = state_of(find_session(name))
    except NotFoundError:
        return
    if not known.has_ended:
        raise CheckFailedError(
            f"session {name} already exists: job {known.session.job_id} ({known.reason})",
            where=str(known.session.file("json")),
            fix=f"choose another --name, or end that session with `toolkit session stop {name}`",
        )
    known.session.forget()


def _refused(slurm: Slurm, said: str, code: int) -> ToolkitError:
    words, fix = refusal_of("\n".join(line for line in said.splitlines() if "error" in line or "Unable" in line))
    if has_no_address(said):
        return slurm.unknown_cluster(words)
    return SchedulerRefusedError(f"salloc: {words or f'exit code {code}'}", fix=fix)


def await_grant(session: Session, process: subprocess.Popen[bytes], tell: Callable[[str], object]) -> SessionState:
    """Wait until Slurm grants the nodes; `tell` receives the reason for waiting. Ctrl-C cancels the request.

    Raises:
        SchedulerRefusedError: Slurm ended the request without granting nodes.
        InterruptedWaitError: Ctrl-C interrupted the wait.
    """
    asked_at, told = float("-inf"), ""
    try:
        while process.poll() is None:
            if time.monotonic() - asked_at > QUESTION_PERIOD_S:
                asked_at, known = time.monotonic(), state_of(session)
                if known.state is RunState.PENDING and known.reason != told:
                    told = known.reason
                    tell(told)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        end_session(session)
        raise InterruptedWaitError(
            f"interrupted; cancelled session {session.name}, job {session.full_job_id}"
        ) from None
    if process.returncode:
        said = session.file("log").read_text(errors="replace")
        session.forget()
        raise _refused(slurm_of(session.job), said, process.returncode)
    return state_of(session)


def end_session(session: Session) -> None:
    """Cancel the job of a session, running or pending, and remove the session's files."""
    slurm_of(session.job).cancel([session.job_id])
    session.forget()


def state_of(session: Session) -> SessionState:
    """Return the current state of a session."""
    return states_of([session])[0]


def states_of(sessions: Sequence[Session]) -> list[SessionState]:
    """Return the current states of sessions, with one query to each cluster."""
    clusters: dict[Slurm, list[Session]] = {}
    for session in sessions:
        clusters.setdefault(slurm_of(session.job), []).append(session)
    known: dict[str, SessionState] = {}
    for cluster, members in clusters.items():
        try:
            facts = cluster.jobs(session.job_id for session in members)
        except (SchedulerRefusedError, NotFoundError) as error:
            silent = f"Slurm does not respond: {error.message}"
            known |= {one.name: SessionState(one, RunState.UNKNOWN, silent, [], None) for one in members}
            continue
        known |= {one.name: _state(one, facts.get(one.job_id)) for one in members}
    return [known[session.name] for session in sessions]


def _state(session: Session, fact: JobFacts | None) -> SessionState:
    if fact is None:
        return SessionState(session, RunState.LOST, f"Slurm no longer knows job {session.job_id}", [], None)
    state = run_state(fact.state)
    reason = f"Slurm: {fact.state}"
    if state is RunState.PENDING:
        reason += _why_it_waits(fact)
    if state is not RunState.RUNNING:
        return SessionState(session, state, reason, [], None)
    return SessionState(session, state, reason, expand_hostlist(fact.nodes), printed_limit_s(fact.time_left))


def _why_it_waits(fact: JobFacts) -> str:
    known = pending_reason(fact.reason or "None", names_nodes=bool(fact.required_nodes))
    said = f" ({fact.reason}): {known.words}"
    if known.can_start is CanStart.NEVER:
        return f"{said}; it cannot start unless the request changes"
    return said + (f"; expected to start at {fact.start_time}" if fact.start_time else "")


def running_session(name: str) -> SessionState:
    """Return a session that is running; warn if it ends soon.

    Raises:
        NotFoundError: no session has this name.
        CheckFailedError: it is pending, or has ended; the record of an ended session is removed.
    """
    known = state_of(find_session(name))
    if known.has_ended:
        known.session.forget()
        raise CheckFailedError(
            f"session {name} has ended ({known.reason})", fix=f"`toolkit session start --name {name}` starts another"
        )
    if known.state is not RunState.RUNNING or not known.nodes:
        raise CheckFailedError(
            f"session {name} has no nodes yet ({known.reason})", fix="wait until `toolkit session ls` lists its nodes"
        )
    if known.ends_soon:
        say(ending_of(known))
    return known


def ending_of(known: SessionState) -> str:
    """Return a warning with the time at which a session ends."""
    assert known.left_s is not None
    end = time.strftime("%H:%M", time.localtime(time.time() + known.left_s))
    return f"session {known.session.name} ends in {known.left_s / 60:.0f} min, at {end}; save your work"


def enter(name: str, environ: MutableMapping[str, str]) -> Site:
    """Set the SLURM_* variables of a session's allocation, as in a shell under salloc; return its site.

    Raises: the errors of `running_session`.
    """
    known = running_session(name)
    job, nodes = known.session.job, len(known.nodes)
    slurm = slurm_of(job)
    cpus = int(slurm.call(["squeue", "--noheader", f"--jobs={known.session.job_id}", "--Format=NumCPUs"])) // nodes
    ranks = job.job.ranks_per_node
    outside = without_job(environ)
    for variable in [variable for variable in environ if variable not in outside]:
        del environ[variable]
    hosts = ",".join(known.nodes)
    environ.update({
        "SLURM_JOB_ID": known.session.job_id, "SLURM_JOBID": known.session.job_id,
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts,
        "SLURM_NTASKS": str(nodes * ranks), "SLURM_NPROCS": str(nodes * ranks), "SLURM_TASKS_PER_NODE": f"{ranks}(x{nodes})",
        "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{nodes})",
        "SLURM_OVERLAP": "1",  # a shell or notebook of the session also uses CPUs
    })  # fmt: skip
    if job.job.partition:
        environ["SLURM_JOB_PARTITION"] = job.job.partition
    if slurm.configuration:
        environ["SLURM_CONF"] = slurm.configuration
    if slurm.cluster:
        environ["SLURM_CLUSTERS"] = slurm.cluster
    return site_of_session(known.session)


def site_of_session(session: Session) -> Site:
    """Return the site of a session from its current file, but with the slurm.conf that the session started with."""
    site, conf = site_of(session.job), session.job.scheduler.conf
    return site if site.scheduler.conf == conf else site.with_conf(typed_path(conf), "the session's")
