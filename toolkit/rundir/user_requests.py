"""Requests of users and of alerts to a run: small files in `control/`."""

import getpass
import time
from contextlib import suppress

from toolkit.rundir.files import append_line, read_json, utc_now, write_json, write_text
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

__all__ = ["add_requeue", "move_requests", "note_request", "user_name"]


def user_name() -> str:
    """Return the name of this user; "" if the system does not know it."""
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def note_request(run: RunDirectory, request: str, by: str) -> None:
    """Record that a command or a rule requests a save, a stop or the like, for the supervisor."""
    note = {"time": utc_now(), "request": request, "user": user_name(), "by": by}
    write_json(run.control / f"asked-{time.time_ns()}-{request}.json", note)


def move_requests(attempt: AttemptDirectory) -> None:
    """Move the records of requests to the events of the attempt, whose only writer is the supervisor."""
    for path in sorted(attempt.run.control.glob("asked-*.json")):
        append_line(attempt.events, {"event": "requested", **read_json(path)})
        path.unlink()


def add_requeue(run: RunDirectory, asked_at: str) -> None:
    """Add the time of a request to `control/requeue`."""
    path = run.control / "requeue"
    write_text(path, (path.read_text(encoding="utf-8") if path.exists() else "") + asked_at + "\n")
