"""Watch the ranks of one attempt, and determine how it ended."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.metrics.windows import ONE_RANK_READ
from toolkit.rundir.files import append_line, read_json_or_none, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, rank_of
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd, first_failure, silent_end, timed_out, with_hang
from toolkit.supervise.launchers import Ranks, ScriptRanks
from toolkit.supervise.log import say
from toolkit.supervise.progress import last_step
from toolkit.supervise.rank_files import begun_ranks
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Shape
from toolkit.supervise.stacks import NO_STACKS, Culprit, collect_stacks, culprit_of

T = TypeVar("T")

POLL_S = 0.2
CONTROL_PERIOD_S = 1.0  # pause between reads of `control/`, which is on a shared file system
SETTLE_S = 1.5  # time after the first error for other ranks to report theirs
END_PERIOD_S = 300.0  # pause between queries for the end time of the allocation
FILE_SYSTEM_PATIENCE_S = 600.0  # a file server failover takes minutes, and ranks may not even notice it
MARKER_PATIENCE_S = 3.0  # a network file system may show the last done markers late
START_S = 15.0  # time for the first rank to start before the supervisor queries Slurm for a reason
TERM_S = 10.0  # time between SIGTERM and SIGKILL for programs that first receive `job.signal`
LONGEST_PAUSES = 10
BEAT_PERIOD_S = 1.0  # a heartbeat may be written this late, which hides as much of the pause after it
LAUNCHER_PATIENCE_S = 15.0  # time for the launcher to exit after every rank has exited


class Reasons(Protocol):
    """Reports causes of signals and the end of the allocation; the supervisor implements it with Slurm queries."""

    def why_warned(self) -> Cause | None:
        """Return the cause of SIGUSR2: walltime or preemption; None if the ranks need not stop yet."""

    def why_terminated(self) -> Cause:
        """Return the cause of SIGTERM, as far as Slurm reports it while the ranks still run."""

    def grace_s(self, cause: Cause) -> float:
        """Return the seconds that ranks have to save after a stop request."""

    def refuse_superseded(self) -> None:
        """Raise SupersededError if a newer start has taken over the run."""

    def why_not_started(self) -> str:
        """Return why the launcher has started no rank yet; "" if that is unknown."""

    def refresh_end(self, attempt: AttemptDirectory) -> None:
        """Query the end time of the allocation again, and pass it to the ranks if it has changed."""


@dataclass
class AttemptWatch:
    """Watches the ranks of one attempt.

    `stall_s` is the longest time allowed from the launch to the first step, and between steps. Unmanaged ranks run
    programs without toolkit's signal handlers, so they receive SIGTERM instead of a stop request. A script that only reports
    its steps may do so rarely, so `stall_s` applies to it only if the user set it. Steps that are read from the output of a
    program also stop while it validates or saves, so they may be absent for `LONGEST_PAUSES` times the longest such pause.
    They do not stall after the last step, or if the process that reads them has failed.
    """

    run: RunDirectory
    attempt: AttemptDirectory
    shape: Shape
    request: StopRequest
    reasons: Reasons
    stall_s: float
    is_unmanaged: bool
    is_stall_set: bool = False  # whether the user set `stall_s`
    reads_steps: bool = False  # whether steps of unmanaged ranks are read from their output
    has_own_signal: bool = False  # whether unmanaged ranks receive `job.signal` before SIGTERM
    _last_beat: int = 0
    _beat_seen_at: float = 0.0
    _control_seen_at: float = float("-inf")
    _end_seen_at: float = 0.0
    _markers_seen_at: float = 0.0
    _all_ended_at: float | None = None
    _failed_at: float | None = None
    _is_signalled: bool = False
    _needs_file: bool = False
    _is_flagged: bool = False
    _is_hurried: bool = False
    _term_at: float = float("inf")  # when SIGTERM follows the own signal of a program
    _is_wait_reported: bool = False
    _flag_tried_at: float = float("-inf")
    _asked_at: float = 0.0  # when the ranks were asked to stop
    _kill_at: float | None = None  # end of the grace time after a stop request
    _killed_after_s: float | None = None  # how long after that request the ranks were killed
    _longest_pause_s: float = 0.0  # between two heartbeats, or since the last one
    _limit_s: float = 0.0  # seconds without a step after which the attempt has stalled
    _is_stalled: bool = False
    _is_stacks_asked: bool = False
    _answer: threading.Thread | None = None  # collects the stacks that `toolkit stacks` requested
    _may_stall: bool = True
    _unreadable_since: float | None = None
    _collecting: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, ranks: Ranks) -> AttemptEnd:
        """Watch until every rank has exited; return how they ended."""
        self._beat_seen_at = self._end_seen_at = time.monotonic()
        self._limit_s = self.stall_s
        over = threading.Event()
        # Signals have their own thread, so that neither a hanging file system nor a slow Slurm query delays them.
        signaller = threading.Thread(target=self._signal_ranks, args=(ranks, over), daemon=True)
        signaller.start()
        try:
            while ranks.exit_code() is None:
                if self._is_time_over() or self._retrying(lambda: self._is_over(ranks)):
                    break
                time.sleep(POLL_S)
        finally:
            over.set()
            signaller.join()
        if self._is_stalled:
            return self._end_stalled(ranks)
        if self._failed_at is not None:
            self._retrying(lambda: self._collect_late_stacks(ranks))
        ranks.kill()  # a rank may still run although the launcher has exited
        code = ranks.exit_code()
        while (end := self._retrying(lambda: self._end_with_step(code if code is not None else 1))) is None:
            time.sleep(POLL_S)
        return end

    def _retrying(self, action: Callable[[], T]) -> T | None:
        """Return the result of an action on the run directory, or None while its file system does not respond.

        Raises:
            OwnFailureError: the file system has not responded for `FILE_SYSTEM_PATIENCE_S`.
        """
        try:
            result = action()
        except OSError as error:
            now = time.monotonic()
            if self._unreadable_since is None:
                self._unreadable_since = now
                say(f"the run directory does not respond ({error}); the ranks continue, and the supervisor retries")
            if now - self._unreadable_since > FILE_SYSTEM_PATIENCE_S or self.request.kill:
                raise OwnFailureError(
                    f"the run directory has not responded for {now - self._unreadable_since:.0f} s: {error.strerror}",
                    where=str(error.filename or self.run.path),
                    fix=f"repair the file system, then run `toolkit resume {self.run.run_id}`",
                ) from error
            return None
        if self._unreadable_since is not None:
            say(f"the run directory responds again after {time.monotonic() - self._unreadable_since:.0f} s")
            self._unreadable_since = None
            self._beat_seen_at = time.monotonic()  # no stall: the outage may have blocked the ranks
        return result

    def _signal_ranks(self, ranks: Ranks, over: threading.Event) -> None:
        """Signal the ranks to save and exit as soon as a stop is requested, without accessing files or Slurm."""
        while not self.request.came:
            while self.request.to_pass and isinstance(ranks, ScriptRanks):
                ranks.pass_signal(self.request.to_pass.pop(0))
            if over.wait(POLL_S):
                return
        self._is_signalled = True
        if self.is_unmanaged:
            ranks.terminate()
        else:
            self._needs_file = not ranks.forward_stop()

    def _is_time_over(self) -> bool:
        now = time.monotonic()
        if self.request.kill:
            self.event("killed", reason="requested twice")
        elif self._kill_at is not None and now > self._kill_at:
            self.event("killed", reason="grace time is over")
        else:
            return False
        self._killed_after_s = now - self._asked_at if self._asked_at else 0.0
        return True

    def _is_over(self, ranks: Ranks) -> bool:
        """Check once for each event that ends an attempt; return whether the attempt is over."""
        now = time.monotonic()
        if self._failed_at is None and self._has_failed(ranks):
            self._failed_at = now
            self.event("rank_failed")
        if self._failed_at is not None and now - self._failed_at > SETTLE_S:
            return True
        if now - self._end_seen_at > END_PERIOD_S:
            self._end_seen_at = now
            self.reasons.refresh_end(self.attempt)
        self._report_wait(now)
        self._read_requests(now)
        if self._is_stacks_asked and not (self._answer is not None and self._answer.is_alive()):
            # Ranks may need seconds to write their stacks, and a kill must not wait for them.
            self._answer = threading.Thread(target=self._answer_stacks, args=(ranks,), daemon=True)
            self._answer.start()
            self._is_stacks_asked = False
        if self._have_all_ended(now):
            self.event("killed", reason="the launcher did not exit after every rank had")
            return True
        cause = self.request.cause
        if cause is Cause.NODE_LOST:  # ranks on the lost node never respond, so the others cannot save
            return True
        if cause is not None and self._kill_at is None:
            grace_s = self.reasons.grace_s(cause)
            self._asked_at, self._kill_at = now, now + grace_s
            if self.has_own_signal:
                self._term_at = now + max(grace_s / 2, grace_s - TERM_S)
            self.event("stop_requested", cause=cause.value, seconds=round(grace_s))
        is_short = self.request.terminated or cause is Cause.CANCELLED  # Slurm kills the job itself after KillWait
        if is_short and self._kill_at is not None and cause is not None and not self._is_hurried:
            self._is_hurried = True
            self._kill_at = min(self._kill_at, now + self.reasons.grace_s(cause))
        if now > self._term_at:
            self._term_at = float("inf")
            ranks.terminate()
        if self._needs_file:
            self._needs_file = False
            self.event("stop_by_file", note="this launcher does not forward signals; rank 0 reads the flag within 5 s")
        if cause is not None and not self._is_flagged and now - self._flag_tried_at >= CONTROL_PERIOD_S:
            self._flag(cause, now)
        self._read_heartbeat(now)
        self._is_stalled = self._kill_at is None and self._all_ended_at is None and self._stalled(now)
        return self._is_stalled

    def _report_wait(self, now: float) -> None:
        """Report once why no rank has started within `START_S`."""
        if self._is_wait_reported or now - self._beat_seen_at < START_S:
            return
        self._is_wait_reported = True
        if not begun_ranks(self.attempt) and (why := self.reasons.why_not_started()):
            self.event("waiting", reason=why)

    def _flag(self, cause: Cause, now: float) -> None:
        """Write the stop flag, which rank 0 polls. A full disk must not end ranks that can still save elsewhere."""
        is_first, self._flag_tried_at = self._flag_tried_at < 0, now
        try:
            write_text(self.attempt.stop_flag, cause.value + "\n")
        except OSError as error:
            if is_first:
                say(f"cannot write {self.attempt.stop_flag}: {error.strerror}; retrying")
            return
        self._is_flagged = True

    def _have_all_ended(self, now: float) -> bool:
        """Return whether every rank has been done for `LAUNCHER_PATIENCE_S`; the launcher may still be running."""
        if self._all_ended_at is None and now - self._markers_seen_at >= CONTROL_PERIOD_S:
            self._markers_seen_at = now
            # While rank 0 works, only its marker is checked: listing the folder would read two files per rank.
            if self.attempt.done_marker(0).exists() and len(self._marked()) == self.shape.ranks:
                self._all_ended_at = now
        return self._all_ended_at is not None and now - self._all_ended_at > LAUNCHER_PATIENCE_S

    def _end_stalled(self, ranks: Ranks) -> AttemptEnd:
        self.event("stalled", seconds=round(self._limit_s))
        where = self._retrying(lambda: self._stacks(range(self.shape.ranks), ranks))
        ranks.kill()
        found = self._retrying(lambda: self._culprit(where or []))
        reason, step = f"no step for {self._limit_s:.0f} s", self._retrying(lambda: last_step(self.attempt))
        reason += f" ({ONE_RANK_READ})" if "steps_per_s" in (self._retrying(self._heartbeat) or {}) else ""
        reason += f": {found.sentence}" if found is not None else ""
        fix = "" if step is not None else "raise restart.stall_s if the program needs longer to reach its first step"
        rank = found.ranks[0] if found is not None and len(found.ranks) == 1 else None
        host = found.host or None if found is not None else None
        end = AttemptEnd(Cause.STALLED, reason, 125, rank, host, last_lines=where or [], step=step, fix=fix)
        return self._retrying(lambda: with_hang(end, self.attempt)) or end

    def culprit(self, ranks: Ranks) -> Culprit:
        """Collect the stacks of all ranks while they stall, and return who stalls them. Another thread calls this."""
        lines = self._stacks(range(self.shape.ranks), ranks)
        self.event("stacks", summary=lines)
        return self._culprit(lines)

    def _culprit(self, lines: Sequence[str]) -> Culprit:
        return culprit_of(self.attempt, range(self.shape.ranks)) if lines else Culprit(NO_STACKS)

    def _collect_late_stacks(self, ranks: Ranks) -> None:
        """If ranks timed out waiting for others, collect the stacks of those others before they are killed."""
        if timed_out(self.attempt) and ranks.exit_code() is None:
            reported = {*self._marked(), *map(rank_of, self.attempt.errors.glob("rank-*.json"))}
            self._stacks([rank for rank in range(self.shape.ranks) if rank not in reported], ranks)

    def _stacks(self, numbers: Sequence[int], ranks: Ranks) -> list[str]:
        if self.shape.is_once:  # the guard of a batch script forwards the signal to it
            return []
        with self._collecting:
            return collect_stacks(self.attempt, numbers, ranks, is_unmanaged=self.is_unmanaged)

    def _answer_stacks(self, ranks: Ranks) -> None:
        try:
            self.event("stacks", summary=self._stacks(range(self.shape.ranks), ranks))
            (self.run.control / "stacks").unlink(missing_ok=True)  # the reply
        except OSError as error:  # the request remains, and is read again
            say(f"cannot collect the stacks: {error}")

    def event(self, name: str, **details: Any) -> None:
        """Log an event, and append it to the event file of the attempt. A failure to write it is only logged."""
        fields = " ".join(f"{key}={value}" for key, value in details.items())
        say(f"attempt {self.attempt.number}: {name} {fields}".rstrip())
        try:
            append_line(self.attempt.events, {"time": utc_now(), "event": name, **details})
        except OSError as error:
            say(f"cannot write {self.attempt.events}: {error.strerror}")

    def _read_requests(self, now: float) -> None:
        if now - self._control_seen_at >= CONTROL_PERIOD_S or self.request.terminated:
            self._control_seen_at = now
            self.reasons.refuse_superseded()
            for name, cause in (("cancel", Cause.CANCELLED), ("stop", Cause.STOPPED)):
                if self.run.is_asked(name):
                    self.request.ask(cause)
            self.request.kill = self.request.kill or self.run.is_asked("kill")
            self._is_stacks_asked = (self.run.control / "stacks").exists()
        if self.request.needs_reason and (reason := self.reasons.why_warned()) is not None:
            self.request.ask(reason)
        if self.request.cause is None and self.request.terminated:
            self.request.ask(self.reasons.why_terminated())

    def end_before_launch(self) -> AttemptEnd | None:
        """Return the end of an attempt if a stop, such as Ctrl-C, was requested before any rank started; else None."""
        self._control_seen_at = float("-inf")  # read the requests now, not at the next period
        self._read_requests(time.monotonic())
        cause = self.request.cause
        return AttemptEnd(cause, f"ended on request ({cause.value}) before any rank was started") if cause else None

    def _has_errors(self) -> bool:
        return any(self.attempt.errors.glob("rank-*.json"))

    def _has_failed(self, ranks: Ranks) -> bool:
        """Return whether a rank or the launcher failed. Unmanaged programs may exit with any code after SIGTERM."""
        if self.is_unmanaged and self._is_signalled:
            return False
        return self._has_errors() or ranks.report_a_death()

    def _read_heartbeat(self, now: float) -> None:
        try:
            beat = self.attempt.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:  # rank 0 has not finished a step yet
            return
        # Compare times of this host's clock only: that of the file server may differ by minutes.
        if self._last_beat:
            self._longest_pause_s = max(self._longest_pause_s, now - self._beat_seen_at)
        if beat != self._last_beat:
            self._last_beat, self._beat_seen_at = beat, now
            step = self._heartbeat()
            accepts, is_read = (
                not self.is_unmanaged or step.get("saves", True),
                self.reads_steps and "steps_per_s" in step,
            )
            # After its last step a program may still test or upload, and a failed reader leaves no rate.
            is_last = step.get("step", -1) >= step.get("total", math.inf) or step.get("steps_per_s", 0) is None
            self._may_stall = bool(accepts or ((self.is_stall_set or is_read) and not is_last))
            if is_read:
                self._limit_s = max(self.stall_s, LONGEST_PAUSES * (self._longest_pause_s + BEAT_PERIOD_S))

    def _stalled(self, now: float) -> bool:
        may_stall = self._may_stall and (self._last_beat or not self.is_unmanaged)  # not all programs write heartbeats
        return bool(may_stall) and now - self._beat_seen_at > self._limit_s

    def _heartbeat(self) -> dict[str, Any]:
        try:
            return read_json_or_none(self.attempt.heartbeat) or {}
        except ToolkitError:  # a damaged heartbeat does not exempt a rank from `stall_s`
            return {}

    def _accepts_stops(self) -> bool:
        """Return whether the heartbeat is that of a loop with `world.should_stop`, which reaches every step soon."""
        return bool(self._heartbeat().get("saves", True))

    def _classify(self, code: int) -> AttemptEnd:
        deadline = time.monotonic() + MARKER_PATIENCE_S
        while True:
            ends = self._markers()
            if len(ends) == self.shape.ranks or self._has_errors() or time.monotonic() > deadline:
                break
            if self.request.cause is not None:
                break
            time.sleep(POLL_S)
        self._read_requests(time.monotonic())  # SIGTERM may have arrived after the last check
        cause = self.request.cause
        if len(ends) == self.shape.ranks and set(ends.values()) == {"done"}:  # despite a late stop request
            return AttemptEnd(Cause.COMPLETED, "every rank is done")
        if cause is not None:  # errors of ranks that are being stopped are consequences of the stop
            how, fix = self._how_stopped(cause, have_all_ended=len(ends) == self.shape.ranks)
            return AttemptEnd(cause, f"ended on request ({cause.value}){how}", fix=fix)
        failure = first_failure(self.attempt)
        if failure is not None:
            return failure
        if len(ends) == self.shape.ranks:
            return AttemptEnd(Cause.STOPPED, "every rank received a stop signal that the supervisor did not receive")
        return silent_end(self.attempt, self.shape.ranks, code)

    def _how_stopped(self, cause: Cause, *, have_all_ended: bool) -> tuple[str, str]:
        """Return what is known of the ranks' saves at a requested end, and what helps if they did not save."""
        killed_s = self._killed_after_s
        if self.is_unmanaged and not (self._last_beat and self._accepts_stops()):
            if not self._asked_at:  # they ended before the request reached them
                return "", ""
            if killed_s is not None:
                fix = "" if self.request.kill else _more_time(cause, self.run.run_id, math.ceil(killed_s / 5) * 10)
                return f"; killed {killed_s:.0f} s after the request, so a save may be incomplete", fix
            return f"; its processes exited {time.monotonic() - self._asked_at:.0f} s after the request", ""
        if have_all_ended:
            return "", ""
        unsaved = "; not every rank had saved"
        if killed_s is None or self.request.kill:
            return unsaved, ""
        poll = "call world.should_stop more often, also in long phases such as an evaluation"
        if self._has_asked_since():
            why = f"the ranks asked whether to stop, but did not finish their saves within {killed_s:.0f} s"
            needed_s = 2 * killed_s
        else:
            why = f"no rank asked within {killed_s:.0f} s whether to stop"
            needed_s = max(self._longest_pause_s, killed_s)
            if self._last_beat:
                why += f"; the longest time in which no rank asked was {self._longest_pause_s:.0f} s"
        return f"{unsaved}: {why}", _more_time(cause, self.run.run_id, math.ceil(needed_s / 10) * 10, poll)

    def _has_asked_since(self) -> bool:
        """Return whether the last step in the heartbeat came after the stop request. It may be written a second later."""
        try:
            asked_at = time.time() - (time.monotonic() - self._asked_at)
            # Rank 0 runs on the supervisor's node, with the same clock.
            return datetime.fromisoformat(self._heartbeat()["time"]).timestamp() >= asked_at
        except (KeyError, TypeError, ValueError):  # a damaged heartbeat
            return self._beat_seen_at >= self._asked_at

    def _marked(self) -> dict[int, Path]:
        return {rank_of(path): path for path in self.attempt.ranks.glob("rank-*.done")}

    def _markers(self) -> dict[int, str]:
        # If the disk is full, the guard of a rank (its parent process) can only leave an empty marker.
        return {rank: path.read_text(encoding="utf-8").strip() or "done" for rank, path in self._marked().items()}

    def _end_with_step(self, code: int) -> AttemptEnd:
        return replace(self._classify(code), step=last_step(self.attempt))


def _more_time(cause: Cause, run_id: str, seconds: int, *others: str) -> str:
    """Return what gives ranks `seconds` to save after a request with this cause, and what else helps."""
    more = {
        Cause.STOPPED: f"`toolkit stop {run_id} --within {seconds}s`",
        Cause.WALLTIME: f"set restart.warn_s = {seconds} or more",
    }
    return ", or ".join([more[cause], *others] if cause in more else others)
