"""Requests of users and of alerts to a run: small files in `control/`."""

import getpass
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolkit.rundir.files import append_line, read_json, utc_now, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

__all__ = ["add_requeue", "ask_to_stop", "move_requests", "note_request", "stop_within_s", "user_name"]

LEAST_STOP_S = 60.0  # to save after a stop; a job with a short walltime may have a shorter `restart.warn_s`


def user_name() -> str:
    """Return the name of this user; "" if the system does not know it."""
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def note_request(run: RunDirectory, request: str, by: str) -> None:
    """Record that a command or a rule requests a save, a stop or the like, for the supervisor."""
    note = {"time": utc_now(), "request": request, "user": user_name(), "by": by}
    write_json(run.control / f"asked-{time.time_ns()}-{request}.json", note)


def ask_to_stop(run: RunDirectory, within_s: float | None) -> None:
    """Request a stop; `within_s` are the seconds that the ranks have to save, None for the job's own."""
    write_text(run.control / "stop", f"{utc_now()}{f' within {within_s:.0f} s' if within_s is not None else ''}\n")


def stop_within_s(run: RunDirectory, restart: Mapping[str, Any]) -> float:
    """Return the seconds that ranks have to save after a stop, given the job's [restart] table.

    That is what the user has set for this stop, else the time that a walltime gives them, and at least a minute.
    """
    asked = run.asked_file("stop")
    text = asked.read_text(encoding="utf-8", errors="replace") if asked is not None else ""
    seconds = re.search(r" within (\d{1,9}) s$", text, re.MULTILINE | re.ASCII)
    return float(seconds[1]) if seconds else max(LEAST_STOP_S, float(restart["warn_s"]))


def move_requests(attempt: AttemptDirectory) -> None:
    """Move the records of requests to the events of the attempt, whose only writer is the supervisor."""
    for path in sorted(attempt.run.control.glob("asked-*.json")):
        append_line(attempt.events, {"event": "requested", **read_json(path)})
        path.unlink()


def add_requeue(run: RunDirectory, asked_at: str) -> None:
    """Add the time of a request to `control/requeue`."""
    path = run.control / "requeue"
    write_text(path, (path.read_text(encoding="utf-8") if path.exists() else "") + asked_at + "\n")
