"""Notifications in `alerts/outbox/`, until a host with access to their channel sends them, each once.

A sender claims a file by a rename. If it vanishes, another one claims the file after `RECLAIM_S`.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.alert_rules import channels_of
from toolkit.rundir.files import make_folder, read_json, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.channels import post

__all__ = ["put", "send_outbox"]

RECLAIM_S = 600.0


def put(run: RunDirectory, channel: str, document: Mapping[str, Any]) -> None:
    """Add a notification."""
    for folder in (run.outbox.parent, run.outbox, run.outbox.with_name("sent")):
        with suppress(FileExistsError):
            make_folder(folder)
    write_json(run.outbox / f"{time.time_ns()}-{document['key']}-{document['state']}.{channel}.json", document)


def send_outbox(
    run: RunDirectory, notify: Mapping[str, Any], report: Callable[[str], None], *, is_login: bool = True
) -> int:
    """Send what waits, and return how many were sent. A channel that fails keeps the rest; `report` gets the reason."""
    sent = 0
    # apprise is only installed where commands run.
    blocked = {name for name, one in channels_of(notify).items() if one.startswith("apprise:") and not is_login}
    for path in sorted(run.outbox.glob("[0-9]*.json*")):
        name, _, claim = path.name.partition(".json")
        channel = name.rpartition(".")[2]
        if channel in blocked:
            continue
        blocked.add(channel)  # a later notification must not overtake one that fails or that another sender has
        claimed = path.with_name(f"{name}.json.{os.uname().nodename}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            if claim and time.time() - path.stat().st_ctime < RECLAIM_S:
                continue
            path.rename(claimed)
            post(channel, read_json(claimed), notify, os.environ)
        except FileNotFoundError:  # another sender was faster
            continue
        except ToolkitError as error:
            report(f"cannot notify {channel}: {error}")
            claimed.rename(run.outbox / f"{name}.json")
            continue
        claimed.rename(run.outbox.with_name("sent") / f"{name}.json")
        blocked.discard(channel)
        sent += 1
    return sent
