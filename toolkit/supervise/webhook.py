"""Call the webhook of [notify]: post a small JSON document for each attempt end that the user wants to know of.

Each post has its own thread. Errors are logged without the URL, which is a secret.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.rundir.files import utc_now
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause, EndDecision, Next
from toolkit.supervise.channels import POST_TIMEOUT_S, post_or_log
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say

_EVENTS = {Cause.STALLED: "stall", Cause.PREEMPTED: "preemption", Cause.NODE_LOST: "failure"}
_PLAIN_ENDS = (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED, Cause.WALLTIME)


def event_of(decision: EndDecision) -> str:
    """Return the event in `webhook_on` for an attempt's end; "" for one such as walltime if the run continues."""
    if decision.cause in _PLAIN_ENDS:
        return "end" if decision.next is Next.END else ""
    return _EVENTS.get(decision.cause, "failure")


@dataclass
class Webhook:
    """Posts each document in its own thread; `wait` gives the threads time to finish."""

    job: Mapping[str, Any]
    environ: Mapping[str, str]
    under_way: list[threading.Thread] = field(default_factory=list)

    def tell(self, attempt: AttemptDirectory, end: AttemptEnd, decision: EndDecision) -> None:
        """Post the end of an attempt, if the job requests this event."""
        wanted = self.job.get("notify") or {}
        event = event_of(decision)
        if not wanted.get("webhook") or event not in wanted.get("webhook_on", ()):
            return
        document = _document(self.job, attempt, end, decision, event)
        self.start(post_or_log, "webhook", document, wanted, self.environ)

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        """Call `target` in a thread of its own, for which `wait` waits."""
        name = f"channel {arguments[0]}" if arguments else "a channel of [alerts]"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self.under_way = [*filter(threading.Thread.is_alive, self.under_way), thread]

    def wait(self) -> None:
        """Wait a few seconds for pending posts, because the process is about to exit."""
        deadline = time.monotonic() + POST_TIMEOUT_S
        for thread in self.under_way:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                say(f"{thread.name} did not respond within {POST_TIMEOUT_S:.0f} s")
        self.under_way.clear()


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
        "text": text, "event": event, "job_name": name, "run_id": attempt.run.run_id, "attempt": attempt.number,
        "cause": decision.cause.value, "reason": end.reason, "next": decision.next.value, "final": is_final,
        "state": decision.final_state.value if is_final else "running", "exit_code": decision.exit_code if is_final else None,
        "step": end.step, "time": utc_now(),
    }  # fmt: skip
