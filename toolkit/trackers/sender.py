"""Send the metrics of a run to one tracker, whatever its package or server does."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.secrets import hide
from toolkit.supervise.trackers import GIVES_UP
from toolkit.terminal.talk import say_beside
from toolkit.trackers.rows import Row, Unsent
from toolkit.trackers.sinks import TRACKERS, Described, Tracker

__all__ = ["PERIOD_S", "send_metrics"]

PERIOD_S = 2.0
LONGEST_PAUSE_S = 60.0  # after failures
LONGEST_REASON = 200  # characters of an error of a package
_TABLES = ("job", "train", "parallel", "args")


def send_metrics(
    run: RunDirectory, job: Mapping[str, Any], name: str, states: Iterator[str | None], *, is_live: bool
) -> int:
    """Send what tracker `name` has not received, each time `states` yields None, and at last the state of the run.

    Args:
        job: the resolved job.
        is_live: whether the run is active, so that a tracker may record offline instead.

    Returns:
        The exit code: 0 if everything was sent, `GIVES_UP` if another trial would not help, or 1.
    """
    try:
        unsent = Unsent(run.metrics, run.trackers / f"{name}.json")
        secrets = [os.environ[variable] for variable in job["env"].get("secrets") or () if variable in os.environ]
        described = Described(
            run.run_id, run.job_name, parameters_of(job), run.trackers / name, unsent.kept, unsent.keep, is_live,
            lambda error: reason_of(error, secrets),
        )  # fmt: skip
        return Sender(name, described, unsent).send_all(states)
    except ToolkitError as error:
        say_beside(f"{name}: {error.message}; fix: {error.fix}")
        return GIVES_UP


class Sender:
    """Sends to one tracker, which may not respond for any time."""

    def __init__(self, name: str, run: Described, unsent: Unsent) -> None:
        self._name, self._run, self._unsent = name, run, unsent
        self._tracker: Tracker | None = None
        self._problem, self._pause_s, self._retry_at = "", PERIOD_S, 0.0

    def send_all(self, states: Iterator[str | None]) -> int:
        """Send until `states` has the state of the run; return 0 if everything was sent, else 1."""
        for state in states:
            if state is None and time.monotonic() < self._retry_at:
                continue
            try:
                self._send(state)
            except ToolkitError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the package of the tracker raises
                self._report(error, is_over=state is not None)
                if state is not None:
                    return 1
        return 0

    def _send(self, state: str | None) -> None:
        sent = self._unsent.send(self._accept)
        if sent and self._problem:
            say_beside(f"{self._name}: sending again")
        self._problem, self._pause_s = "", PERIOD_S
        if state and self._unsent.kept.get("sent"):
            self._accept([])  # the tracker learns the end, even if this start has no metrics
        if state is not None and self._tracker is not None:
            self._tracker.close(state)

    def _accept(self, rows: list[Row]) -> None:
        if self._tracker is None:
            self._tracker = TRACKERS[self._name](self._run)
        self._tracker.send(rows)

    def _report(self, error: Exception, *, is_over: bool) -> None:
        text = self._run.reason_of(error)
        follows = "trying again; the run does not wait for it"
        if is_over:
            follows = f"`toolkit metrics send {self._run.run_id}` sends the rest"
        if is_over or text != self._problem:
            say_beside(f"{self._name} does not accept metrics: {text}; {follows}")
        self._problem, self._pause_s = text, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._retry_at = time.monotonic() + self._pause_s


def reason_of(error: Exception, secrets: list[str]) -> str:
    """Return the first line of an error without secrets: packages quote the address of a server with its password."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return hide(re.sub(r"://[^/\s]+@", "://***@", text), secrets)[:LONGEST_REASON]  # a cut secret would not be found


def parameters_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the job's tables that describe an experiment, by dotted key, without empty ones."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{prefix}.{name}", inner)
        elif value not in ("", None, [], 0):
            flat[prefix] = value

    for table in _TABLES:
        add(table, job.get(table) or {})
    return flat
