"""Notifications in `alerts/outbox/`, until a host with access to their channel sends them, each once.

A sender claims a file by a rename. If it vanishes, another one claims the file after `RECLAIM_S`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.alert_rules import channels_of
from toolkit.rundir.files import make_folder, read_json, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.channels import post

__all__ = ["put", "send_outbox", "waiting_channels"]

RECLAIM_S = 120.0  # a post takes seconds


def put(run: RunDirectory, channel: str, document: Mapping[str, Any]) -> None:
    """Add a notification."""
    for folder in (run.outbox.parent, run.outbox, run.outbox.with_name("sent")):
        with suppress(FileExistsError):
            make_folder(folder)
    write_json(run.outbox / f"{time.time_ns()}-{document['key']}-{document['state']}.{channel}.json", document)


def waiting_channels(run: RunDirectory) -> dict[str, list[Path]]:
    """Return the notifications that wait, oldest first, by channel."""
    by_channel: dict[str, list[Path]] = {}
    for path in sorted(run.outbox.glob("[0-9]*.json*")):
        by_channel.setdefault(path.name.partition(".json")[0].rpartition(".")[2], []).append(path)
    return by_channel


def send_outbox(
    run: RunDirectory, notify: Mapping[str, Any], report: Callable[[str], None], *, is_login: bool = True
) -> int:
    """Send what waits to all channels at once, and return how many were sent; `report` gets why a channel failed."""
    by_channel, kinds, sent = waiting_channels(run), channels_of(notify), list[str]()
    threads = [
        threading.Thread(target=_send_in_order, args=(run, channel, paths, notify, report, sent), daemon=True)
        for channel, paths in by_channel.items()
        # apprise is only installed where commands run.
        if is_login or not kinds.get(channel, "").startswith("apprise:")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(sent)


def _send_in_order(
    run: RunDirectory, channel: str, paths: Iterable[Path], notify: Mapping[str, Any], report: Callable[[str], None],
    sent: list[str],
) -> None:  # fmt: skip
    """Send the notifications of a channel until one fails or another sender has one: a later one must not overtake it."""
    for path in paths:
        name, _, claim = path.name.partition(".json")
        claimed = path.with_name(f"{name}.json.{os.uname().nodename}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            if claim and time.time() - path.stat().st_ctime < RECLAIM_S:
                return
            path.rename(claimed)
            post(channel, read_json(claimed), notify, os.environ)
        except FileNotFoundError:  # another sender was faster
            return
        except ToolkitError as error:
            report(f"cannot notify {channel}: {error}")
            claimed.rename(run.outbox / f"{name}.json")
            return
        claimed.rename(run.outbox.with_name("sent") / f"{name}.json")
        sent.append(name)
