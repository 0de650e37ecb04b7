"""The supervisor of one start: it runs attempts, and decides what follows each one. `start.py` creates it."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from toolkit.errors import OWN_FAILURE, NotFoundError, OwnFailureError, SchedulerRefusedError, ToolkitError
from toolkit.metrics.own import MeanLog
from toolkit.metrics.windows import declared_metrics
from toolkit.rundir.attempt_records import OWN_REQUEUE, AttemptRecord, StartRecord, keep_room
from toolkit.rundir.claims import SupersededError, claim_attempt, end_start, refuse_superseded
from toolkit.rundir.files import utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import ENDINGS, NO_REQUEUE, Cause, EndDecision, Next, RunState, decide
from toolkit.rundir.user_requests import stop_within_s
from toolkit.slurm.commands import Slurm
from toolkit.supervise.alerting import Alerting
from toolkit.supervise.allocation import (
    ANSWER_S,
    STOP_GRACE_S,
    Allocation,
    is_in_grace_time,
    lost_nodes,
    other_steps,
    terminate_steps,
    why_terminated,
)
from toolkit.supervise.attempt import FILE_SYSTEM_PATIENCE_S, AttemptWatch
from toolkit.supervise.continuation import await_end, requeue, submit_follow_up
from toolkit.supervise.controller import await_controller
from toolkit.supervise.done_task import tidy_done_task
from toolkit.supervise.ending import end_after_all, halvings, judge, out_of_time, record_end, unlaunched, without_room
from toolkit.supervise.environment import rank_environment
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.launch import choose_launcher, has_own_signal, is_unmanaged, launch
from toolkit.supervise.log import say
from toolkit.supervise.node_health import UNFIT_FIX, nodes_to_exclude, unfit_nodes
from toolkit.supervise.notifier import Notifier
from toolkit.supervise.observation import Observation
from toolkit.supervise.progress import state_of_files, with_files
from toolkit.supervise.repeated_jobs import Turn, cancel_later_turns
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.restart_arguments import restart_variables
from toolkit.supervise.retry import ROOM_S, Retry
from toolkit.supervise.script_end import end_of_script
from toolkit.supervise.secrets import read_secrets, without_secrets
from toolkit.supervise.shape import Shape
from toolkit.supervise.shared_memory import remove_left_behind
from toolkit.supervise.staging import Staged, stage, unstage
from toolkit.supervise.symptoms import CONTROLLER_AWAY, NODE_LOST
from toolkit.supervise.trackers import Trackers

__all__ = ["WALLTIME_SLACK_S"]

WALLTIME_SLACK_S = 90.0  # Slurm sends --signal up to a minute early
END_MARGIN_S = 10.0  # ranks are killed this long before the allocation ends
REQUEUE_S = 30.0  # time reserved for a requeue before walltime
SHORTEST_PATIENCE_S = 5.0
MOST_LAUNCHES = 10  # launches per attempt if slurmctld fails repeatedly
LAUNCH_PAUSE_S = 20.0  # two pauses together exceed KillWait, which is 30 s on most sites


@dataclass
class Supervisor:
    """The state of one start."""

    run: RunDirectory
    job: Mapping[str, Any]
    start: int
    allocation: Allocation
    shape: Shape
    script: Path  # the batch script of this start
    request: StopRequest
    turn: Turn | None = None  # set if this start is one of the repeated jobs
    lost_nodes: list[str] = field(default_factory=list)
    stop_grace_s: float = STOP_GRACE_S
    nodes_checked: bool = False
    staged: Staged | None = None
    secrets: dict[str, str] = field(default_factory=dict)  # secret values of the last attempt, by variable
    launched_at: float = 0.0  # when the last launcher started
    is_unexplained: bool = False  # whether Slurm ends this job without reporting why
    is_requeued: bool = False  # whether the program has requeued this job itself

    @cached_property
    def notifier(self) -> Notifier:
        return Notifier(self.run, self.job)

    @cached_property
    def trackers(self) -> Trackers:
        return Trackers(self.run, self.start, list((self.job.get("observe") or {}).get("trackers") or ()))

    @property
    def retry(self) -> Retry:
        """Retries for the file system of the run directory, which leave enough time for a requeue at walltime."""
        left_s = self.allocation.left_s() - REQUEUE_S
        return Retry(self.request, min(FILE_SYSTEM_PATIENCE_S, max(SHORTEST_PATIENCE_S, left_s)))

    @property
    def _early_s(self) -> float:
        """The seconds until `restart.warn_s` before the end."""
        return self.allocation.left_s() - float(self.job["restart"]["warn_s"])

    def may_be_early(self) -> bool:
        """Return whether a SIGUSR2 of now may be a warning of the walltime that Slurm has sent too early."""
        return 0 < self._early_s <= WALLTIME_SLACK_S

    def why_warned(self) -> Cause | None:
        """Return the cause of SIGUSR2: walltime if the (possibly changed) end time is near, else preemption.

        None means that Slurm has sent the warning too early: the ranks continue until `restart.warn_s` before the end.
        """
        have_ranks_received_it = self.request.came
        self.allocation.refresh_end()
        if self._early_s <= 0 or (self.may_be_early() and have_ranks_received_it):
            return Cause.WALLTIME
        if not self.may_be_early():
            return Cause.PREEMPTED
        if self.allocation.in_slurm and is_in_grace_time(self.allocation):
            return Cause.PREEMPTED
        self.request.hold(self._early_s)
        return None

    def why_terminated(self) -> Cause:
        """Return the cause of SIGTERM: a lost node, or else the cause that Slurm reports."""
        if not self.allocation.in_slurm:
            return Cause.CANCELLED
        self.lost_nodes = lost_nodes(self.allocation)
        return Cause.NODE_LOST if self.lost_nodes else self._why_slurm_ends_us()

    def _why_slurm_ends_us(self) -> Cause:
        """Return the cause that Slurm reports; else preemption, which does not end a run that Slurm starts again."""
        cause = why_terminated(self.allocation)
        self.is_unexplained = cause is None
        return cause or Cause.PREEMPTED

    def grace_s(self, cause: Cause) -> float:
        """Return the seconds that ranks have to save."""
        if cause is Cause.WALLTIME and (self.request.terminated or self.allocation.left_s() <= 0):
            return self.stop_grace_s  # Slurm ends the job: at its walltime, or because a script has requeued it
        left_s = max(1.0, self.allocation.left_s() - END_MARGIN_S)
        # Only Slurm knows the site's grace time for preempted jobs, and it ends the job itself after that.
        if cause is Cause.WALLTIME or (cause is Cause.PREEMPTED and self.allocation.in_slurm):
            return left_s
        if cause is Cause.STOPPED and not self.request.terminated:
            return min(left_s, stop_within_s(self.run, self.job["restart"]))
        return self.stop_grace_s

    def why_not_started(self) -> str:
        """Return which other steps of the allocation run, because srun waits for their CPUs; "" if there are none."""
        steps = ", ".join(other_steps(self.allocation, self.launched_at))
        return f"srun waits for CPUs that other steps of this allocation use: {steps}" if steps else ""

    def refuse_superseded(self) -> None:
        """Raise SupersededError if a newer start has taken over the run: this one must no longer write to it."""
        refuse_superseded(self.run, self.start)

    def refresh_end(self, attempt: AttemptDirectory) -> None:
        """Query the end time of the allocation, and pass it to the ranks if it has changed."""
        if self.allocation.refresh_end():
            write_text(attempt.ends_at, f"{self.allocation.ends_at:.0f}\n")
            say(f"the end time of the allocation has changed: {self.allocation.left_s():.0f} s are left")

    def fail(self, error: Exception) -> None:
        """Record that the supervisor itself failed; the caller raises the error again."""
        reason = error.message if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
        end = AttemptEnd(Cause.SUPERVISOR_FAILED, reason, OWN_FAILURE, fix=getattr(error, "fix", ""))
        for write in (
            lambda: self._record_failure(end),
            lambda: end_start(self.run, self.start, state=RunState.FAILED.value, exit_code=OWN_FAILURE),
        ):
            try:
                write()
            except (OSError, ToolkitError) as problem:
                say(f"cannot record that the supervisor failed: {problem}")

    def _record_failure(self, end: AttemptEnd) -> None:
        """Record the failure as the end of the last attempt of this start or of a new one, or after a recorded end."""
        self.refuse_superseded()
        attempt = self._own_attempt() or claim_attempt(self.run)
        if attempt.exit_file.exists():
            recorded = AttemptRecord.read(attempt)
            if recorded is not None and not recorded.final:
                reason = f"the supervisor could not continue: {end.reason}"
                end_after_all(attempt, reason, state=RunState.FAILED, exit_code=OWN_FAILURE)
            return
        if not attempt.start_file.exists():
            self._begin(attempt, choose_launcher(self.job, self.allocation))
        # Records of earlier attempts are not read here: a damaged one may be the cause of the failure.
        decision = decide(end.cause, budgets={}, spent={}, again=None)
        record_end(attempt, end, decision, 0.0, Retry(self.request, 0.0))
        self.notifier.tell(attempt, end, decision)
        self.notifier.wait()

    def _own_attempt(self) -> AttemptDirectory | None:
        """Return the last attempt if this start has claimed it; None otherwise."""
        attempt = self.run.last_attempt()
        if attempt is None:
            return None
        begun = StartRecord.read(attempt)
        # Without a start record, this start has just claimed the attempt; attempts of earlier starts have an end.
        if begun is None or not attempt.start_file.exists():
            return None if attempt.exit_file.exists() else attempt
        return attempt if begun.start == self.start else None

    def run_start(self) -> int:
        """Run attempts until the run or the allocation ends; return the job's exit code."""
        while True:
            self.retry.wait_for(self.refuse_superseded)
            attempt = self.retry.wait_for(lambda: claim_attempt(self.run))
            began = time.monotonic()
            end = self._by_steps(attempt, self._unless_requeued(self._attempt(attempt)))
            end = without_secrets(end, self.secrets.values())
            self.retry.wait_for(self.refuse_superseded)
            decision = self.retry.wait_for(partial(self._decision, end))
            self._record(attempt, end, decision, time.monotonic() - began)
            if decision.next is not Next.RESTART:
                return self._leave(attempt, decision)
            if decision.cause is Cause.LAUNCH_FAILED and self.allocation.in_slurm:
                self._let_old_steps_end()

    def _unless_requeued(self, end: AttemptEnd) -> AttemptEnd:
        """Return the end of an attempt, corrected if its program has called `scontrol requeue`, as Lightning does on SIGUSR1.

        A stop stays a stop, and a walltime counts as one if toolkit requeues at walltimes; else the program decides. A
        batch script that exits is checked only if it contains the word `requeue`.
        """
        if not self.allocation.in_slurm or not is_unmanaged(self.job["job"]["entry"]):
            return end
        may_be = end.cause is Cause.STOPPED or (self.request.terminated and end.cause is Cause.WALLTIME)
        if self.shape.is_once and end.cause in (Cause.COMPLETED, Cause.CRASHED):
            may_be = b"requeue" in self.run.batch_script.read_bytes()
        if not (may_be and self.allocation.was_requeued()):
            return end
        self.is_requeued = True
        if end.cause is Cause.STOPPED:
            return end
        is_walltime = end.cause is Cause.WALLTIME and bool(self.job["restart"].get("walltimes"))
        cause = Cause.WALLTIME if is_walltime else Cause.PREEMPTED
        limit = "" if is_walltime else "; with restart.walltimes = -1, restart.blind_requeues limits such requeues"
        return AttemptEnd(
            cause, OWN_REQUEUE + limit, step=end.step, changed_files=end.changed_files, new_files=end.new_files,
            files=end.files,
        )  # fmt: skip

    def _by_steps(self, attempt: AttemptDirectory, end: AttemptEnd) -> AttemptEnd:
        """Return the end of an attempt, with the steps that failed inside a batch script that exited with 0 or was stopped."""
        has_time = end.cause is Cause.COMPLETED or (end.cause is Cause.STOPPED and not self.request.terminated)
        if not (self.shape.is_once and has_time):
            return end
        must_succeed = bool(self.job["restart"].get("steps_must_succeed"))
        return self.retry.wait_for(
            lambda: end_of_script(end, attempt, self.allocation, began=self.launched_at, must_succeed=must_succeed)
        )

    def _let_old_steps_end(self) -> None:
        """Wait before launching the ranks again: Slurm may still be ending steps of an earlier start on a node.

        A request to stop also ends the wait: the next attempt checks for one first.
        """
        deadline = time.monotonic() + LAUNCH_PAUSE_S
        say(f"starting the ranks again in {LAUNCH_PAUSE_S:.0f} s")
        while time.monotonic() < deadline and not self._is_asked_to_end():
            time.sleep(1.0)

    def _is_asked_to_end(self) -> bool:
        return self.request.came or self.retry.wait_for(lambda: any(map(self.run.is_asked, ("stop", "cancel"))))

    def _begin(self, attempt: AttemptDirectory, launcher: str, halved: int = 0) -> None:
        record = StartRecord(
            self.start,
            self.allocation.job_id,
            self.shape.nodes,
            self.shape.ranks,
            utc_now(),
            socket.gethostname(),
            launcher,
            halved,
        )
        record.write(attempt)

    def _attempt(self, attempt: AttemptDirectory) -> AttemptEnd:
        launcher, restart = choose_launcher(self.job, self.allocation), self.job["restart"]
        pattern = str(restart.get("progress") or "")
        files = state_of_files(pattern, self.run.whole.path)
        halved = self.retry.wait_for(lambda: halvings(self.run, self.start, restart))
        environment = rank_environment(
            os.environ, self.job, self.run, attempt, start=self.start, shape=self.shape, launcher=launcher,
            ends_at=self.allocation.ends_at, halvings=halved,
        ) | self.retry.wait_for(lambda: restart_variables(attempt, restart, files))  # fmt: skip
        self.retry.wait_for(lambda: self._begin(attempt, launcher, halved))
        try:
            self.retry.wait_for(lambda: keep_room(attempt))
        except OSError as error:
            return without_room(error, self.run)
        unmanaged = is_unmanaged(self.job["job"]["entry"])
        watch = AttemptWatch(
            self.run, attempt, self.shape, self.request,
            self, stall_s=float(restart["stall_s"]), is_unmanaged=unmanaged,
            is_stall_set="restart.stall_s" in self.job.get("origins", {}),
            reads_steps=bool((self.job.get("observe") or {}).get("step_line")),
            has_own_signal=unmanaged and has_own_signal(self.job),
        )  # fmt: skip
        watch.event("started", launcher=launcher, ranks=self.shape.ranks, nodes=self.shape.nodes)
        for _ in range(MOST_LAUNCHES):
            end = self._launch(watch, launcher, environment)
            if end.cause is not Cause.LAUNCH_FAILED or end.symptom != CONTROLLER_AWAY.word:
                break
            if not self._await_controller(end):
                return self.retry.wait_for(watch.end_before_launch) or out_of_time(end)
            attempt.launcher_log.unlink(missing_ok=True)  # the next launch must be judged by its own messages
            self.nodes_checked = False
        return self.retry.wait_for(lambda: with_files(end, attempt, pattern, files)) if pattern else end

    def _await_controller(self, end: AttemptEnd) -> bool:
        """Wait for slurmctld to respond after a failed launch, but keep the time that ranks need to save."""
        reason = end.evidence[0][1] if end.evidence else end.reason
        kept_s = float(self.job["restart"]["warn_s"])
        return await_controller(
            self.allocation, self.request, reason, kept_s=kept_s, is_asked_to_end=self._is_asked_to_end
        )  # fmt: skip

    def _launch(self, watch: AttemptWatch, launcher: str, environment: dict[str, str]) -> AttemptEnd:
        """Prepare the nodes, start the ranks, and watch them until they exit."""
        attempt, began = watch.attempt, time.time()
        try:
            end = self.retry.wait_for(watch.end_before_launch) or self._unfit(launcher) or self._stage()
            # A request during the preparation of the nodes takes precedence over its result.
            if (end := self.retry.wait_for(watch.end_before_launch) or end) is not None:
                return end
            python = self.staged.python if self.staged else sys.executable
            self.secrets = read_secrets(self.job, os.environ, self.request)
            self.trackers.begin(environment | self.secrets)
            self.launched_at = time.time()
            ranks = launch(
                launcher, self.job, self.shape, environment | self.secrets, attempt,
                python=python, nodes=self.allocation.nodes_in_order(), terminate_steps=self._terminate_steps,
            )  # fmt: skip
        except OwnFailureError as error:
            return unlaunched(error)
        left_s = self.allocation.left_s
        alerting = Alerting(attempt, self.job, left_s, self.notifier)
        means = MeanLog(attempt.run.metrics, attempt.number, declared_metrics(self.job))
        observation = Observation(attempt, left_s, alerting, lambda: watch.culprit(ranks), means)
        observation.start()
        try:
            return watch.follow(ranks)
        except SupersededError:
            ranks.abandon()
            raise
        finally:
            ranks.kill()  # no rank may outlive its attempt, even if the watch failed
            observation.close()
            remove_left_behind(began)  # cleans up this node; on others, the rank guards of the next attempt do

    def _terminate_steps(self, script: int, is_over: Callable[[], bool]) -> None:
        """Send TERM to the steps of a batch script, whose guard is the process `script`, unless Slurm has done so."""
        if self.allocation.in_slurm:
            terminate_steps(self.allocation, script, lambda: self.request.terminated or is_over())

    def _unfit(self, launcher: str) -> AttemptEnd | None:
        """Check the nodes before the first ranks of this start; return the end of the attempt if one is unfit."""
        if self.nodes_checked or launcher != "srun":
            return None
        self.nodes_checked = True
        unfit = unfit_nodes(self.run, self.job, self.start, self.allocation, os.environ, self.request)
        if not unfit:
            return None
        reason = "; ".join(map(str, unfit[:4]))
        return AttemptEnd(Cause.NODE_UNFIT, reason, OWN_FAILURE, host=unfit[0].node, fix=UNFIT_FIX)

    def _stage(self) -> AttemptEnd | None:
        """Stage the ranks' environment, once per start; return the end of the attempt if that fails."""
        try:
            self.staged = self.staged or stage(self.run, self.job, self.allocation, os.environ, self.request)
        except OwnFailureError as error:
            return unlaunched(error)
        return None

    def _decision(self, end: AttemptEnd) -> EndDecision:
        cause = self._cause_in_slurm(end) if self.allocation.in_slurm else end.cause
        tells_steps = not is_unmanaged(self.job["job"]["entry"])
        again = self._next_start(cause)
        why_last = self.turn.why_last(self.run.run_id) if self.turn is not None else NO_REQUEUE
        restart = self.job["restart"]
        if self.turn is not None and not tells_steps:  # the user has limited the number of jobs
            restart = {**restart, "blind_requeues": -1}
        return judge(self.run, restart, self.start, end, cause, again, tells_steps=tells_steps, why_last=why_last)

    def _next_start(self, cause: Cause) -> Next | None:
        """Return how another start may follow this one; None if none may."""
        if self.turn is not None:
            return None if self.turn.is_last else Next.FOLLOW_UP
        if not self.job["job"]["requeue"]:
            return None
        by_requeue = bool(self.job["scheduler"].get("can_requeue", True))
        again = self.allocation.next_start(by_requeue=by_requeue)
        if again is Next.FOLLOW_UP and by_requeue and ENDINGS[cause].with_budget is Next.AWAIT:
            # Slurm requeues the job itself, without scontrol; a follow-up job would start the run a second time.
            return Next.REQUEUE
        return again

    def _cause_in_slurm(self, end: AttemptEnd) -> Cause:
        """Return the cause of an attempt's end, corrected by Slurm's report. A cancel overrides earlier requests."""
        cause = end.cause
        # During the grace time of a preemption, and on a node without slurmd, Slurm may send SIGTERM only to the ranks.
        unheard = cause is Cause.STOPPED and self.request.cause is None
        by_slurm = unheard or (self.request.terminated and cause in (Cause.PREEMPTED, Cause.WALLTIME))
        if by_slurm and self.run.is_asked("cancel"):
            return Cause.CANCELLED
        is_node_failure = end.symptom == NODE_LOST.word  # srun reports it before Slurm marks the node as down
        may_be_one = self.allocation.nodes > 1 and cause in (Cause.CRASHED, Cause.STALLED, Cause.LAUNCH_FAILED)
        if by_slurm or may_be_one or is_node_failure:
            self.lost_nodes = lost_nodes(self.allocation)
            if self.lost_nodes or is_node_failure:
                return Cause.NODE_LOST
        if not by_slurm:
            # A program without a handler is killed by the SIGTERM that starts the grace time.
            is_termed = cause is Cause.CRASHED and end.exit_code == 128 + signal.SIGTERM and self.request.cause is None
            return Cause.PREEMPTED if is_termed and is_in_grace_time(self.allocation) else cause
        said = self._why_slurm_ends_us()
        return cause if cause is Cause.WALLTIME and said is Cause.PREEMPTED else said

    def _record(self, attempt: AttemptDirectory, end: AttemptEnd, decision: EndDecision, seconds: float) -> None:
        if decision.cause is Cause.NODE_LOST:
            nodes = ", ".join(self.lost_nodes) or "a node"
            host = next(iter(self.lost_nodes), None)
            end = replace(end, reason=f"Slurm reports that {nodes} failed", rank=None, host=host)
        elif decision.cause is Cause.ENVIRONMENT:
            end = replace(end, cause=decision.cause, symptom="")
        elif end.cause is not decision.cause:
            end = replace(end, reason=f"Slurm ended the attempt ({decision.cause.value})", rank=None, host=None, fix="")
        if decision.cause is Cause.PREEMPTED and self.is_unexplained:
            end = replace(end, reason=f"{end.reason}; Slurm did not report why")
        retry = replace(self.retry, room_seconds=ROOM_S)  # wait until the user frees space for this record
        record_end(attempt, end, decision, seconds, retry)
        self.notifier.tell(attempt, end, decision)
        if decision.next is Next.END:
            try:
                Alerting(attempt, self.job, self.allocation.left_s, self.notifier).resolve_all(decision.cause.value)
            except OSError as error:
                say(f"cannot resolve the alerts of the run: {error.strerror}")

    def _leave(self, attempt: AttemptDirectory, decision: EndDecision) -> int:
        state = decision.final_state.value if decision.next is Next.END else decision.next.value
        try:
            self.retry.wait_for(partial(end_start, self.run, self.start, state=state, exit_code=decision.exit_code))
        except OSError as error:
            say(f"cannot record that this start has ended: {error.strerror}")
        self.trackers.end(decision.final_state.value if decision.next is Next.END else "")
        self.notifier.wait()
        if self.staged is not None:
            unstage(self.staged, self.allocation, os.environ)
        if self.allocation.task is not None and decision.final_state is RunState.COMPLETED:
            tidy_done_task(self.run, self.start, self.allocation.job_id)
        if self.turn is not None:
            if decision.next is Next.END:
                cancel_later_turns(self.turn)
            return decision.exit_code  # the next repeated job starts when this one has ended
        if self.is_requeued:
            return self._leave_requeued(decision)
        if decision.next is Next.END:
            return decision.exit_code
        self.request.terminated = False  # this SIGTERM announced the end; the next one ends the job
        exclude = nodes_to_exclude(self.run, self.job)
        try:
            if decision.next is Next.FOLLOW_UP:
                given = [*self.job["scheduler"].get("options", []), *self.job["job"].get("sbatch", [])]
                submit_follow_up(
                    self.run, self.allocation, self.script, self.start + 1, exclude=exclude, given=given
                )  # fmt: skip
                return decision.exit_code
            # If this job exited by itself before the requeue, Slurm would treat it as finished.
            if decision.next is Next.AWAIT and await_end(self.request):
                return decision.exit_code
            requeue(self.allocation, self.request, exclude=exclude)
        except (ToolkitError, OSError) as error:
            problem = f"cannot continue the run: {error.message if isinstance(error, ToolkitError) else error}"
            say(f"{problem}; run `toolkit resume {self.run.run_id}` to continue it")
            end_after_all(attempt, problem)
        return decision.exit_code

    def _leave_requeued(self, decision: EndDecision) -> int:
        """Leave the next start to the requeue of the program, or cancel the requeued job if the run has ended."""
        if decision.next is Next.END:
            say("cancelling this job, which its program has requeued, because the run has ended")
            try:
                Slurm(timeout_s=ANSWER_S).cancel([self.allocation.job_id])
            except (NotFoundError, SchedulerRefusedError) as error:
                say(f"cannot cancel it: {error.message}; it will exit as soon as it starts")
        return decision.exit_code
