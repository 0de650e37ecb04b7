"""Read a list of hosts as Slurm writes it: what it means, or that it means nothing."""

from __future__ import annotations

import hashlib
from typing import Any

from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING

KEYS = {
    "valid": "true when it is a list of hosts",
    "expected": '"reject" when it is none, else null',
    "count": "how many hosts it names, null when it is none",
    "expansion": "each of them, in its order, the second mention dropped; null when it is none",
    "first": "the first of them",
    "last": "the last of them",
    "expansion_sha1": "SHA-1 of all of them, with a line end between two",
    "clustershell": "what ClusterShell says against it: nobody can tell from the text, always null",
    "clustershell_order": "the order that ClusterShell gives them: nobody can tell from the text, always null",
}


def parse_hostlist(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of a list of hosts: (values of `KEYS`, why it is none).

    Raises:
        CheckFailedError: there is no text.
    """
    if not text.strip():
        raise CheckFailedError("no list of hosts: the text is empty", where="line 1")
    facts: dict[str, Any] = dict.fromkeys(KEYS)
    try:
        hosts = [] if text.strip() in NOTHING else expand_hostlist(text.strip())
    except ToolkitError as error:
        return facts | {"valid": False, "expected": "reject"}, (f"line 1: {error.message}",)
    if not hosts:
        return facts | {"valid": False, "expected": "reject"}, ("line 1: names no host",)
    return facts | {
        "valid": True, "count": len(hosts), "expansion": hosts, "first": hosts[0], "last": hosts[-1],
        "expansion_sha1": hashlib.sha1("\n".join(hosts).encode(), usedforsecurity=False).hexdigest(),
    }, ()  # fmt: skip
