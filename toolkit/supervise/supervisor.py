"""The supervisor: one life of an allocation. It claims the start, runs attempts, and decides what follows each."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from toolkit.errors import NotFoundError, OwnFailureError, SchedulerRefusedError
from toolkit.rundir.claims import claim_attempt, claim_start, end_start
from toolkit.rundir.files import append_line, read_json, read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import ENDINGS, Cause, Next, RunState, Verdict, decide
from toolkit.slurm.commands import Slurm
from toolkit.supervise.allocation import Allocation, find_allocation, process_start_ticks, why_terminated
from toolkit.supervise.attempt import AttemptWatch, StopRequest
from toolkit.supervise.environment import rank_environment
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.launchers import Ranks, Shape, find_mpirun, launch_local, launch_mpirun, launch_srun

WALLTIME_SLACK_S = 90.0  # Slurm sends --signal up to a minute early
REQUEUE_PATIENCE_S = 300.0  # after a requeue Slurm ends us; it may take its time
STOP_GRACE_S = (
    20.0  # less than Slurm's default KillWait of 30 s, so that the attempt's record is still written
)


@dataclass
class Supervisor:
    """State of one start."""

    run: RunDirectory
    job: Mapping[str, Any]
    start: int
    allocation: Allocation
    shape: Shape
    request: StopRequest = field(default_factory=StopRequest)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.allocation.in_slurm:
            self.request.on_terminate = Cause.PREEMPTED  # until Slurm is asked

    def handle_signals(self) -> None:
        """USR2: the end is near. TERM: Slurm wants us gone. INT: the user at the terminal, twice for now."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not end a run

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.request.kill = self.interrupted
            self.interrupted = True
            if not self.request.terminated:
                self.request.ask(Cause.STOPPED)
        elif number == signal.SIGTERM:
            self.request.terminated = True
        else:
            near = self.allocation.left_s() <= float(self.job["restart"]["warn_s"]) + WALLTIME_SLACK_S
            self.request.ask(Cause.WALLTIME if near else Cause.PREEMPTED)

    def live(self) -> int:
        """Run attempts until the run ends or the allocation does; the exit code is the job's."""
        while True:
            attempt = claim_attempt(self.run)
            began = time.monotonic()
            end = self._attempt(attempt)
            verdict = self._verdict(end)
            self._record(attempt, end, verdict, time.monotonic() - began)
            if verdict.next is not Next.RESTART:
                return self._leave(attempt, verdict)

    def _attempt(self, attempt: AttemptDirectory) -> AttemptEnd:
        launcher = choose_launcher(self.job, self.allocation, self.shape)
        environment = rank_environment(
            os.environ, self.job, self.run, attempt,
            start=self.start, shape=self.shape, launcher=launcher, ends_at=self.allocation.ends_at,
        )  # fmt: skip
        write_json(
            attempt.start_file,
            {"start": self.start, "job_id": self.allocation.job_id, "host": socket.gethostname(), "launcher": launcher,
             "nodes": self.shape.nodes, "ranks": self.shape.ranks, "time": utc_now()},
        )  # fmt: skip
        restart = self.job["restart"]
        watch = AttemptWatch(
            self.run, attempt, self.shape, self.request,
            stall_s=float(restart["stall_s"]), grace_s=self._grace_s, foreign=is_foreign(self.job["job"]["entry"]),
        )  # fmt: skip
        watch.event("started", launcher=launcher, ranks=self.shape.ranks, nodes=self.shape.nodes)
        try:
            ranks = launch(launcher, self.job, self.shape, environment, attempt)
        except OwnFailureError as error:
            return AttemptEnd(Cause.LAUNCH_FAILED, error.message, 125, fix=error.fix)
        try:
            return watch.follow(ranks)
        finally:
            ranks.kill()  # nothing of an attempt outlives it, not even when the watch itself failed

    def _grace_s(self, cause: Cause) -> float:
        # A preempted job's grace time is the site's, and only Slurm knows it: it ends us by itself.
        if cause is Cause.WALLTIME or (cause is Cause.PREEMPTED and self.allocation.in_slurm):
            return max(1.0, self.allocation.left_s() - 10)
        return STOP_GRACE_S

    def _verdict(self, end: AttemptEnd) -> Verdict:
        cause = end.cause
        if self.allocation.in_slurm:
            cause = self._cause_in_slurm(cause)
        allowed = bool(self.job["job"]["requeue"]) and self.job["scheduler"].get("can_requeue", True)
        requeue = allowed and self.allocation.can_requeue
        previous = self._earlier_ends()
        spent: dict[str, int] = {}
        for record in previous:
            budget = ENDINGS[Cause(record["cause"])].budget
            spent[budget] = spent.get(budget, 0) + 1
        repeated = bool(previous) and _same_failure(previous[-1], end)
        return decide(
            cause, budgets={key: int(self.job["restart"][key]) for key in ("crashes", "walltimes", "preemptions")},
            spent=spent, requeue_allowed=requeue, rank_exit_code=end.exit_code or 1, repeated_without_progress=repeated,
        )  # fmt: skip

    def _cause_in_slurm(self, cause: Cause) -> Cause:
        """What Slurm says of an end that it asked for. A cancel counts whatever was asked before it."""
        # In a preemption's grace time Slurm may send TERM to the ranks alone.
        unheard = cause is Cause.STOPPED and self.request.cause is None
        if not unheard and not (self.request.terminated and cause in (Cause.PREEMPTED, Cause.WALLTIME)):
            return cause
        if (self.run.control / "cancel").exists():
            return Cause.CANCELLED
        said = why_terminated(self.allocation.job_id)
        return cause if cause is Cause.WALLTIME and said is Cause.PREEMPTED else said

    def _earlier_ends(self) -> list[dict[str, Any]]:
        """Ends of this job's earlier attempts; a resume is another job, and begins with full budgets."""
        ends = []
        for attempt in map(self.run.attempt, self.run.attempt_numbers()):
            begun, end = read_json_or_none(attempt.start_file), read_json_or_none(attempt.exit_file)
            if begun is not None and end is not None and begun["job_id"] == self.allocation.job_id:
                ends.append(end)
        return ends

    def _record(self, attempt: AttemptDirectory, end: AttemptEnd, verdict: Verdict, seconds: float) -> None:
        reason = end.reason if end.cause is verdict.cause else f"Slurm ended it ({verdict.cause.value})"
        record = {
            "cause": verdict.cause.value, "next": verdict.next.value, "final": verdict.next is Next.END,
            "state": verdict.final_state.value, "exit_code": verdict.exit_code, "reason": reason,
            "decision": verdict.reason, "rank": end.rank, "host": end.host, "fix": end.fix,
            "last_lines": end.last_lines, "step": end.step, "seconds": round(seconds, 3), "time": utc_now(),
        }  # fmt: skip
        write_json(attempt.exit_file, record)
        append_line(
            attempt.events,
            {"time": utc_now(), "event": "ended", "cause": verdict.cause.value, "next": verdict.next.value},
        )
        place = f" (rank {end.rank} on {end.host})" if end.rank is not None else ""
        say(f"attempt {attempt.number} ended: {verdict.cause.value}{place}: {reason}")
        for line in end.last_lines:
            say(f"    | {line}")
        if end.fix:
            say(f"fix: {end.fix}")
        if verdict.cause is not Cause.COMPLETED:
            say(f"next: {verdict.next.value} ({verdict.reason})")

    def _leave(self, attempt: AttemptDirectory, verdict: Verdict) -> int:
        state = verdict.final_state.value if verdict.next is Next.END else verdict.next.value
        end_start(self.run, self.start, state=state, exit_code=verdict.exit_code)
        if verdict.next is Next.END:
            return verdict.exit_code
        if verdict.next is Next.AWAIT:
            self.request.terminated = False  # this one announced the preemption; the next one is its end
            if self._await_end():  # ending by ourselves before would make Slurm call the job finished
                return verdict.exit_code
            say("Slurm has not requeued the preempted job; the supervisor asks for it")
        try:
            self.request.terminated = False
            Slurm().requeue(self.allocation.job_id)
            if self._await_end():
                return verdict.exit_code
            problem = "Slurm took the requeue and did not follow it"
        except (SchedulerRefusedError, NotFoundError) as error:
            problem = f"the requeue failed: {error.message}"
        say(f"{problem}; continue with `toolkit resume {self.run.run_id}`")
        write_json(
            attempt.exit_file,
            {**read_json(attempt.exit_file), "next": Next.END.value, "final": True, "decision": problem},
        )
        return verdict.exit_code

    def _await_end(self) -> bool:
        """Wait for Slurm to end this job; True as soon as a TERM comes, so that nodes are not kept until its KILL."""
        deadline = time.monotonic() + REQUEUE_PATIENCE_S
        while time.monotonic() < deadline and not self.request.terminated:
            time.sleep(0.5)
        return self.request.terminated


def say(text: str) -> None:
    """One line into the job's log."""
    print(f"toolkit: {text}", flush=True)  # noqa: T201


def is_foreign(entry: object) -> bool:
    """True for scripts and executables, which have none of our handlers; false for `file.py:main`."""
    return not (isinstance(entry, str) and ":" in entry)


def _same_failure(earlier: Mapping[str, Any], end: AttemptEnd) -> bool:
    if end.cause not in (Cause.CRASHED, Cause.STALLED):
        return False
    return (earlier["cause"], earlier["rank"], earlier["reason"], earlier["step"]) == (
        end.cause.value,
        end.rank,
        end.reason,
        end.step,
    )


def choose_launcher(job: Mapping[str, Any], allocation: Allocation, shape: Shape) -> str:
    """The site's launcher; `auto` is srun inside Slurm, else mpirun where there is one, else local."""
    kind = str(job["launcher"].get("kind") or "auto")
    if kind == "srun" and not allocation.in_slurm:
        kind = "auto"
    if kind != "auto":
        return kind
    if allocation.in_slurm:
        return "srun"
    if find_mpirun(str(job["launcher"].get("mpirun") or ""), os.environ):
        return "mpirun"
    say("no mpirun here: the ranks are started one by one, and find each other without MPI")
    return "local"


def launch(
    kind: str, job: Mapping[str, Any], shape: Shape, environment: Mapping[str, str], attempt: AttemptDirectory
) -> Ranks:
    """Start the ranks of one attempt."""
    table = job["launcher"]
    options = [str(option) for option in table.get("options") or []]
    if kind == "srun":
        return launch_srun(shape, environment, attempt, mpi=str(table.get("mpi") or ""), options=options)
    if kind == "mpirun":
        return launch_mpirun(
            shape, environment, attempt, program=str(table.get("mpirun") or ""), options=options
        )
    return launch_local(shape, environment, attempt)


def supervise(run: RunDirectory, job: Mapping[str, Any], *, first_start: int) -> int:
    """Live one start of a run; returns the job's exit code."""
    if not run.path.is_dir():
        raise NotFoundError(
            "this run's directory is gone",
            where=str(run.path),
            fix="submit the job again",
        )
    fewest_nodes = int(str(job["job"]["nodes"]).split("-")[0])  # of "2-4"
    allocation = find_allocation(os.environ, fewest_nodes)
    claim = claim_start(
        run, first=first_start, job_id=allocation.job_id, host=socket.gethostname(), pid=os.getpid(),
        process_started=process_start_ticks(os.getpid()),
    )  # fmt: skip
    write_json(run.start(claim.start) / "job.json", job)
    shape = Shape(
        allocation.nodes, int(job["job"]["ranks_per_node"]), int(job["job"].get("cpus_per_rank") or 0)
    )
    supervisor = Supervisor(run, job, claim.start, allocation, shape)
    supervisor.handle_signals()
    say(
        f"run {run.run_id}, start {claim.start}, job {allocation.job_id}: {shape.ranks} ranks on {shape.nodes} nodes"
    )
    try:
        return supervisor.live()
    except Exception:
        end_start(run, claim.start, state=RunState.FAILED.value, exit_code=125)
        raise
