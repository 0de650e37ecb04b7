"""What the supervisor says into the job's log, which is its stdout."""

from __future__ import annotations


def say(text: str) -> None:
    """One line into the job's log."""
    print(f"toolkit: {text}", flush=True)  # noqa: T201
