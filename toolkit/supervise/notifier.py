"""Notify the channels of [notify]: of the end of attempts that the user wants to know of, and of alerts.

A notification is a file in the run's outbox until a sender delivers it. The supervisor sends in threads, which never delay
the run, and retries while the run is active; `toolkit alerts send` sends what it could not.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.rundir.files import utc_now
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause, EndDecision, Next
from toolkit.supervise.channels import POST_TIMEOUT_S, post_or_log
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say
from toolkit.supervise.outbox import put, send_outbox, waiting_channels

__all__ = ["Notifier"]

RETRY_S = (30.0, 600.0)  # the first and the longest pause after a failure
_EVENTS = {Cause.STALLED: "stall", Cause.PREEMPTED: "preemption", Cause.NODE_LOST: "failure"}
_PLAIN_ENDS = (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED, Cause.WALLTIME)


def event_of(decision: EndDecision) -> str:
    """Return the event in `webhook_on` for an attempt's end; "" for one such as walltime if the run continues."""
    if decision.cause in _PLAIN_ENDS:
        return "end" if decision.next is Next.END else ""
    return _EVENTS.get(decision.cause, "failure")


@dataclass
class Notifier:
    """Puts notifications of a run into its outbox, and sends what waits there; `wait` gives senders time to finish."""

    run: RunDirectory
    job: Mapping[str, Any]
    _senders: list[threading.Thread] = field(default_factory=list)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _problems: set[str] = field(default_factory=set)  # each is logged once
    _pause_s: float = RETRY_S[0]
    _retry_at: float = 0.0

    def tell(self, attempt: AttemptDirectory, end: AttemptEnd, decision: EndDecision) -> None:
        """Notify the webhook of the end of an attempt, if the job requests this event."""
        wanted = self.job.get("notify") or {}
        event = event_of(decision)
        if wanted.get("webhook") and event in wanted.get("webhook_on", ()):
            self.add(["webhook"], _document(self.job, attempt, end, decision, event))

    def add(self, channels: list[str], document: Mapping[str, Any]) -> None:
        """Add a notification for each channel, and send all that wait."""
        for channel in channels:
            try:
                put(self.run, channel, document)
            except OSError as error:  # on a full disk, there is only one try
                say(f"cannot write a notification for {channel}: {error.strerror}")
                self._start(post_or_log, channel, document, self.job["notify"], os.environ)
        if channels and self._is_sender():
            self._start(self._send)

    def retry(self) -> None:
        """Send what waits, also from an earlier start, after a pause that doubles with each failure."""
        is_due = time.monotonic() >= self._retry_at and not self._sending.locked()
        if is_due and self._is_sender() and waiting_channels(self.run):
            self._start(self._send)

    def _is_sender(self) -> bool:
        return (self.job.get("notify") or {}).get("sender") != "login"

    def _send(self) -> None:
        failed: list[str] = []
        with self._sending:
            send_outbox(self.run, self.job["notify"], failed.append, is_login=False)
            self._pause_s = min(2 * self._pause_s, RETRY_S[1]) if failed else RETRY_S[0]
            self._retry_at = time.monotonic() + self._pause_s
        for problem in failed:
            if problem not in self._problems:
                self._problems.add(problem)
                say(problem)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="notifications", daemon=True)
        thread.start()
        self._senders = [*filter(threading.Thread.is_alive, self._senders), thread]

    def wait(self) -> None:
        """Wait a few seconds for what is being sent, because the process is about to exit."""
        deadline = time.monotonic() + POST_TIMEOUT_S
        for thread in self._senders:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._senders):
            names = ", ".join(waiting_channels(self.run)) or "a channel"
            say(f"{names} did not respond within {POST_TIMEOUT_S:.0f} s; `toolkit alerts send` retries")
        self._senders.clear()


def _document(
    job: Mapping[str, Any], attempt: AttemptDirectory, end: AttemptEnd, decision: EndDecision, event: str
) -> dict[str, Any]:
    """Return the document to post: chat services show its `text`."""
    name = job["job"].get("name", attempt.run.job_name)
    is_final = decision.next is Next.END
    state = decision.final_state.value if is_final else decision.next.value
    follows = "" if decision.cause is Cause.COMPLETED else f": {end.reason}"
    text = f"{name} {attempt.run.run_id}: {'' if is_final else 'continues, '}{state}{follows}"
    return {
        "text": text, "event": event, "key": f"{attempt.run.run_id}-attempt-{attempt.number}", "job_name": name, "run_id": attempt.run.run_id, "attempt": attempt.number,
        "cause": decision.cause.value, "reason": end.reason, "next": decision.next.value, "final": is_final,
        "state": decision.final_state.value if is_final else "running", "exit_code": decision.exit_code if is_final else None,
        "step": end.step, "time": utc_now(),
    }  # fmt: skip
