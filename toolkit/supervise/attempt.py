"""One attempt: start the ranks, watch them, and say how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.rundir.files import append_line, read_json_or_none, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd, first_failure, silent_end
from toolkit.supervise.launchers import Ranks, Shape

POLL_S = 0.2
CONTROL_PERIOD_S = 1.0  # `control/` lies on a shared file system
SETTLE_S = 1.5  # after the first error: time for the other ranks to say what they saw
MARKER_PATIENCE_S = 3.0  # a network file system may show the last markers late


@dataclass
class StopRequest:
    """What the signal handlers and `control/` ask of the attempt. Handlers only set fields.

    `terminated` says that TERM came; it counts as `on_terminate` unless `control/` says more.
    """

    cause: Cause | None = None
    kill: bool = False
    terminated: bool = False
    on_terminate: Cause = Cause.CANCELLED

    def ask(self, cause: Cause) -> None:
        """The first request counts: a cancel during a preemption's grace time stays a preemption."""
        if self.cause is None:
            self.cause = cause


@dataclass
class AttemptWatch:
    """The watch over the ranks of one attempt.

    `stall_s` counts from the launch, then from each step. `grace_s` says how long ranks may take to save once they were
    asked to end, by the cause. `foreign` ranks have none of our handlers: they are ended instead of asked.
    """

    run: RunDirectory
    attempt: AttemptDirectory
    shape: Shape
    request: StopRequest
    stall_s: float
    grace_s: Callable[[Cause], float]
    foreign: bool
    _last_beat: int = 0
    _beat_seen_at: float = 0.0
    _control_seen_at: float = float("-inf")

    def follow(self, ranks: Ranks) -> AttemptEnd:
        """Watch until every rank is gone, then say how they ended."""
        self._beat_seen_at = time.monotonic()
        kill_at: float | None = None  # once asked: the end of the grace time
        failed_at: float | None = None
        while (code := ranks.exit_code()) is None:
            now = time.monotonic()
            if failed_at is None and self._has_errors():
                failed_at = now
                self.event("rank_failed")
            if failed_at is not None and now - failed_at > SETTLE_S:
                ranks.kill()
                break
            self._look_at_control(now)
            if self.request.cause is not None and kill_at is None:
                kill_at = now + self.grace_s(self.request.cause)
                self._ask_to_stop(ranks, self.request.cause)
            if self.request.kill or (kill_at is not None and now > kill_at):
                self.event("killed", reason="asked twice" if self.request.kill else "grace time is over")
                ranks.kill()
                break
            if kill_at is None and self._stalled():
                ranks.kill()
                return self._with_step(AttemptEnd(Cause.STALLED, f"no step for {self.stall_s:.0f} s", 125))
            time.sleep(POLL_S)
        ranks.kill()  # the launcher may be gone while one of its ranks is not
        code = ranks.exit_code()
        return self._with_step(self._classify(code if code is not None else 1))

    def event(self, name: str, **details: Any) -> None:
        """Append to the attempt's events, and say it in the job's log."""
        append_line(self.attempt.events, {"time": utc_now(), "event": name, **details})
        told = " ".join(f"{key}={value}" for key, value in details.items())
        print(f"toolkit: attempt {self.attempt.number}: {name} {told}".rstrip(), flush=True)  # noqa: T201

    def _ask_to_stop(self, ranks: Ranks, cause: Cause) -> None:
        self.event("stop_requested", cause=cause.value)
        write_text(self.attempt.stop_flag, cause.value + "\n")
        if self.foreign:
            ranks.terminate()
        elif not ranks.forward_stop():
            self.event(
                "stop_by_file", note="this launcher forwards no signal; rank 0 reads the flag within 5 s"
            )

    def _look_at_control(self, now: float) -> None:
        if now - self._control_seen_at >= CONTROL_PERIOD_S or self.request.terminated:
            self._control_seen_at = now
            for name, cause in (("cancel", Cause.CANCELLED), ("stop", Cause.STOPPED)):
                if (self.run.control / name).exists():
                    self.request.ask(cause)
        if self.request.terminated:
            self.request.ask(self.request.on_terminate)

    def _has_errors(self) -> bool:
        return any(self.attempt.errors.glob("rank-*.json"))

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
        self._look_at_control(time.monotonic())  # a TERM may have come after the last look
        cause = self.request.cause
        ended_foreign = self.foreign and cause is not None  # a script that leaves well on TERM is not done
        if len(ends) == self.shape.ranks and set(ends.values()) == {"done"} and not ended_foreign:
            return AttemptEnd(Cause.COMPLETED, "every rank is done")
        if cause is not None:  # what ranks say while they are being ended is no failure of theirs
            saved = "" if len(ends) == self.shape.ranks or self.foreign else "; not every rank had saved"
            return AttemptEnd(cause, f"ended on request ({cause.value}){saved}")
        failure = first_failure(self.attempt)
        if failure is not None:
            return failure
        if len(ends) == self.shape.ranks:
            return AttemptEnd(
                Cause.STOPPED, "every rank was asked to stop by a signal that the supervisor did not get"
            )
        return silent_end(self.attempt, self.shape.ranks, code)

    def _markers(self) -> dict[int, str]:
        found = {}
        for path in self.attempt.ranks.glob("rank-*.done"):
            found[int(path.stem.split("-")[1])] = path.read_text(encoding="utf-8").strip()
        return found

    def _with_step(self, end: AttemptEnd) -> AttemptEnd:
        return replace(end, step=last_step(self.attempt))


def last_step(attempt: AttemptDirectory) -> int | None:
    """The last step boundary that rank 0 wrote down, None before the first."""
    beat: Mapping[str, Any] | None = read_json_or_none(attempt.heartbeat)
    return None if beat is None else int(beat["step"])
