"""Why an attempt ended, where a rehearsal did to it what its supervisor could only guess at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory

_GUESS = "(out of memory?)"  # of the guard, who sees a SIGKILL and not who sent it


def reason_of(attempt: AttemptDirectory, end: Mapping[str, Any]) -> str:
    """The reason in an attempt's record; a rank that `toolkit rehearse` killed had memory enough."""
    reason = str(end["reason"])
    if _GUESS not in reason:
        return reason
    word = read_json_or_none(attempt.rehearsed)
    killed = word is not None and str(word["failure"]).startswith("kill-")
    return reason.replace(_GUESS, "(by a rehearsal)") if killed else reason
