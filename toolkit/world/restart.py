"""Whether this program continues, for a script that restores its own state. Standard library only."""

import os
from pathlib import Path

__all__ = ["is_restart", "last_progress"]


def is_restart() -> bool:
    """Return whether an earlier attempt of this run has made progress; False outside of a run.

    Progress is a new or changed file that `restart.progress` matches, or without that key a step.
    """
    return os.environ.get("TOOLKIT_RESTART") == "1"


def last_progress() -> Path | None:
    """Return the newest path that `restart.progress` matched when this attempt started, as an absolute path.

    None if no earlier attempt has made progress, if nothing matched, and outside of a run.
    """
    path = os.environ.get("TOOLKIT_LAST_PROGRESS")
    return Path(path) if path else None
