"""The answer of `toolkit parse hostlist`: what a Slurm host list expands to, or why it is invalid."""

from __future__ import annotations

from typing import Any

from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING

KEYS = {
    "valid": "whether it is a valid host list; the other keys are null if it is not",
    "count": "how many hosts it names",
    "expansion": "each of them, in its order, each once",
    "first": "the first of them",
    "last": "the last of them",
}


def parse_hostlist(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of a host list: (values of `KEYS`, why it is invalid).

    Raises:
        CheckFailedError: the text is empty.
    """
    if not text.strip():
        raise CheckFailedError("expected a list of hosts, got an empty text", where="line 1")
    invalid = dict.fromkeys(KEYS) | {"valid": False}
    try:
        hosts = [] if text.strip() in NOTHING else expand_hostlist(text.strip())
    except ToolkitError as error:
        return invalid, (f"line 1: {error.message}",)
    if not hosts:
        return invalid, ("line 1: names no host",)
    return {"valid": True, "count": len(hosts), "expansion": hosts, "first": hosts[0], "last": hosts[-1]}, ()
