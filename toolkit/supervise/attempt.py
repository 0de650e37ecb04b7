"""One attempt: start the ranks, watch them, and say how they ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import append_line, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, rank_of
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd, first_failure, silent_end, timed_out
from toolkit.supervise.launchers import Ranks
from toolkit.supervise.log import say
from toolkit.supervise.progress import last_step
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Shape
from toolkit.supervise.stacks import collect_stacks

T = TypeVar("T")

POLL_S = 0.2
CONTROL_PERIOD_S = 1.0  # `control/` lies on a shared file system
SETTLE_S = 1.5  # after the first error: time for the other ranks to say what they saw
END_PERIOD_S = 300.0  # between questions to Slurm about the end of the allocation
FILE_SYSTEM_PATIENCE_S = 600.0  # a file server that fails over takes minutes; ranks may not even notice
MARKER_PATIENCE_S = 3.0  # a network file system may show the last markers late
LAUNCHER_PATIENCE_S = 15.0  # for a launcher that lives on once every rank has ended


class Reasons(Protocol):
    """Knows what signals mean and when the allocation ends: the supervisor, which can query Slurm."""

    def why_warned(self) -> Cause:
        """What USR2 means: walltime or preemption."""

    def why_terminated(self) -> Cause:
        """What TERM means, as far as it can be said while the ranks still run."""

    def grace_s(self, cause: Cause) -> float:
        """How long ranks may take to save once they were asked to end."""

    def refuse_superseded(self) -> None:
        """Raise SupersededError when another start has the run."""

    def look_at_end(self, attempt: AttemptDirectory) -> None:
        """Find out whether the allocation's end has moved, and tell the ranks."""


@dataclass
class AttemptWatch:
    """The watch over the ranks of one attempt.

    `stall_s` counts from the launch, then from each step. `foreign` ranks have none of our handlers: they are ended
    instead of asked.
    """

    run: RunDirectory
    attempt: AttemptDirectory
    shape: Shape
    request: StopRequest
    reasons: Reasons
    stall_s: float
    foreign: bool
    _last_beat: int = 0
    _beat_seen_at: float = 0.0
    _control_seen_at: float = float("-inf")
    _end_seen_at: float = 0.0
    _markers_seen_at: float = 0.0
    _all_ended_at: float | None = None
    _failed_at: float | None = None
    _are_told: bool = False
    _told_by_file: bool = False
    _is_flagged: bool = False
    _flag_tried_at: float = float("-inf")
    _kill_at: float | None = None  # once asked: the end of the grace time
    _is_stalled: bool = False
    _unreadable_since: float | None = None

    def follow(self, ranks: Ranks) -> AttemptEnd:
        """Watch until every rank is gone, then say how they ended."""
        self._beat_seen_at = self._end_seen_at = time.monotonic()
        over = threading.Event()
        # Neither a file system that hangs nor a slow answer of Slurm's may keep the ranks from hearing of a signal.
        teller = threading.Thread(target=self._tell_ranks, args=(ranks, over), daemon=True)
        teller.start()
        try:
            while ranks.exit_code() is None:
                if self._is_time_over() or self._patiently(lambda: self._is_over(ranks)):
                    break
                time.sleep(POLL_S)
        finally:
            over.set()
            teller.join()
        if self._is_stalled:
            return self._end_stalled(ranks)
        if self._failed_at is not None:
            self._patiently(lambda: self._find_the_late(ranks))
        ranks.kill()  # the launcher may be gone while one of its ranks is not
        code = ranks.exit_code()
        while (end := self._patiently(lambda: self._end_with_step(code if code is not None else 1))) is None:
            time.sleep(POLL_S)
        return end

    def _patiently(self, look: Callable[[], T]) -> T | None:
        """Do what needs the run directory; None when its file system does not answer just now.

        Raises:
            OwnFailureError: it has not answered for `FILE_SYSTEM_PATIENCE_S`.
        """
        try:
            result = look()
        except OSError as error:
            now = time.monotonic()
            if self._unreadable_since is None:
                self._unreadable_since = now
                say(f"the run directory does not respond ({error}); the ranks continue, retrying")
            if now - self._unreadable_since > FILE_SYSTEM_PATIENCE_S or self.request.kill:
                raise OwnFailureError(
                    f"the run directory has not answered for {now - self._unreadable_since:.0f} s: {error.strerror}",
                    where=str(error.filename or self.run.path),
                    fix=f"fix its file system, then `toolkit resume {self.run.run_id}`",
                ) from error
            return None
        if self._unreadable_since is not None:
            say(f"the run directory responds again after {time.monotonic() - self._unreadable_since:.0f} s")
            self._unreadable_since = None
            self._beat_seen_at = time.monotonic()  # ranks may have been waiting for it as well, which is not a stall
        return result

    def _tell_ranks(self, ranks: Ranks, over: threading.Event) -> None:
        """Once asked, have the ranks save and end, by signal: without a file, or Slurm's word on what it meant."""
        while not self.request.came:
            if over.wait(POLL_S):
                return
        self._are_told = True
        if self.foreign:
            ranks.terminate()
        else:
            self._told_by_file = not ranks.forward_stop()

    def _is_time_over(self) -> bool:
        if self.request.kill:
            self.event("killed", reason="asked twice")
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            self.event("killed", reason="grace time is over")
        else:
            return False
        return True

    def _is_over(self, ranks: Ranks) -> bool:
        """Check everything that can end the attempt; True if there is nothing left to wait for."""
        now = time.monotonic()
        if self._failed_at is None and self._has_failed(ranks):
            self._failed_at = now
            self.event("rank_failed")
        if self._failed_at is not None and now - self._failed_at > SETTLE_S:
            return True
        if now - self._end_seen_at > END_PERIOD_S:
            self._end_seen_at = now
            self.reasons.look_at_end(self.attempt)
        self._look_at_requests(now)
        if self._have_all_ended(now):
            self.event("killed", reason="the launcher does not end, though every rank has")
            return True
        cause = self.request.cause
        if cause is Cause.NODE_LOST:  # its ranks will never answer: there is nothing left to save together
            return True
        if cause is not None and self._kill_at is None:
            self._kill_at = now + self.reasons.grace_s(cause)
            self.event("stop_requested", cause=cause.value)
        if self._told_by_file:
            self._told_by_file = False
            self.event("stop_by_file", note="this launcher forwards no signal; rank 0 reads the flag within 5 s")
        if cause is not None and not self._is_flagged and now - self._flag_tried_at >= CONTROL_PERIOD_S:
            self._flag(cause, now)
        self._is_stalled = self._kill_at is None and self._all_ended_at is None and self._stalled()
        return self._is_stalled

    def _flag(self, cause: Cause, now: float) -> None:
        """Leave the request where ranks read it. A full disk must not end ranks that may still save elsewhere."""
        is_first, self._flag_tried_at = self._flag_tried_at < 0, now
        try:
            write_text(self.attempt.stop_flag, cause.value + "\n")
        except OSError as error:
            if is_first:
                say(f"cannot write {self.attempt.stop_flag}: {error.strerror}; retrying")
            return
        self._is_flagged = True

    def _have_all_ended(self, now: float) -> bool:
        """True once all ranks have ended for a while: whether a run is done is theirs to say, not the launcher's."""
        if self._all_ended_at is None and now - self._markers_seen_at >= CONTROL_PERIOD_S:
            self._markers_seen_at = now
            # One file is asked for as long as rank 0 works; the folder has two for each rank.
            if self.attempt.done_marker(0).exists() and len(self._marked()) == self.shape.ranks:
                self._all_ended_at = now
        return self._all_ended_at is not None and now - self._all_ended_at > LAUNCHER_PATIENCE_S

    def _end_stalled(self, ranks: Ranks) -> AttemptEnd:
        self.event("stalled", seconds=round(self.stall_s))
        where = self._patiently(lambda: collect_stacks(self.attempt, range(self.shape.ranks), ranks))
        ranks.kill()
        said, step = f"no step for {self.stall_s:.0f} s", self._patiently(lambda: last_step(self.attempt))
        fix = "" if step is not None else "raise restart.stall_s where the way to the first step takes longer"
        return AttemptEnd(Cause.STALLED, said, 125, last_lines=where or [], step=step, fix=fix)

    def _find_the_late(self, ranks: Ranks) -> None:
        """Where ranks gave up waiting for others, have those say where they are before they are killed."""
        if timed_out(self.attempt) and ranks.exit_code() is None:
            known = {*self._marked(), *map(rank_of, self.attempt.errors.glob("rank-*.json"))}
            collect_stacks(self.attempt, [rank for rank in range(self.shape.ranks) if rank not in known], ranks)

    def event(self, name: str, **details: Any) -> None:
        """Say in the job's log what happens, and append it to the attempt's events. A full disk changes nothing else."""
        told = " ".join(f"{key}={value}" for key, value in details.items())
        say(f"attempt {self.attempt.number}: {name} {told}".rstrip())
        try:
            append_line(self.attempt.events, {"time": utc_now(), "event": name, **details})
        except OSError as error:
            say(f"cannot write {self.attempt.events}: {error.strerror}")

    def _look_at_requests(self, now: float) -> None:
        if now - self._control_seen_at >= CONTROL_PERIOD_S or self.request.terminated:
            self._control_seen_at = now
            self.reasons.refuse_superseded()
            for name, cause in (("cancel", Cause.CANCELLED), ("stop", Cause.STOPPED)):
                if self.run.is_asked(name):
                    self.request.ask(cause)
        if self.request.cause is None and self.request.warned:
            self.request.ask(self.reasons.why_warned())
        if self.request.cause is None and self.request.terminated:
            self.request.ask(self.reasons.why_terminated())

    def end_before_launch(self) -> AttemptEnd | None:
        """The end of an attempt that was asked to stop before any rank was started, as by an early Ctrl-C."""
        self._control_seen_at = float("-inf")  # the caller needs the present state
        self._look_at_requests(time.monotonic())
        cause = self.request.cause
        return AttemptEnd(cause, f"ended on request ({cause.value}); no rank had been started yet") if cause else None

    def _has_errors(self) -> bool:
        return any(self.attempt.errors.glob("rank-*.json"))

    def _has_failed(self, ranks: Ranks) -> bool:
        """A rank died, by its own word or by the launcher's. Programs that were sent TERM may end as they like."""
        if self.foreign and self._are_told:
            return False
        return self._has_errors() or ranks.report_a_death()

    def _stalled(self) -> bool:
        try:
            beat = self.attempt.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:  # no step yet
            beat = 0
            if self.foreign:  # programs without our loop never write one
                return False
        if beat != self._last_beat:
            self._last_beat, self._beat_seen_at = beat, time.monotonic()
        # The age by our own clock: the file server's may be minutes away from ours.
        return time.monotonic() - self._beat_seen_at > self.stall_s

    def _classify(self, code: int) -> AttemptEnd:
        deadline = time.monotonic() + MARKER_PATIENCE_S
        while True:
            ends = self._markers()
            if len(ends) == self.shape.ranks or self._has_errors() or time.monotonic() > deadline:
                break
            if self.request.cause is not None:
                break
            time.sleep(POLL_S)
        self._look_at_requests(time.monotonic())  # a TERM may have come after the last look
        cause = self.request.cause
        if len(ends) == self.shape.ranks and set(ends.values()) == {"done"}:  # also where a request came too late
            return AttemptEnd(Cause.COMPLETED, "every rank is done")
        if cause is not None:  # errors of ranks that are being killed are consequences
            saved = "" if len(ends) == self.shape.ranks or self.foreign else "; not every rank had saved"
            return AttemptEnd(cause, f"ended on request ({cause.value}){saved}")
        failure = first_failure(self.attempt)
        if failure is not None:
            return failure
        if len(ends) == self.shape.ranks:
            return AttemptEnd(Cause.STOPPED, "every rank was asked to stop by a signal that the supervisor did not get")
        return silent_end(self.attempt, self.shape.ranks, code)

    def _marked(self) -> dict[int, Path]:
        return {rank_of(path): path for path in self.attempt.ranks.glob("rank-*.done")}

    def _markers(self) -> dict[int, str]:
        # The guard of a rank whose disk is full leaves an empty one.
        return {rank: path.read_text(encoding="utf-8").strip() or "done" for rank, path in self._marked().items()}

    def _end_with_step(self, code: int) -> AttemptEnd:
        return replace(self._classify(code), step=last_step(self.attempt))
