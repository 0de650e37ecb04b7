"""Folders that are no checkpoints any more go in the background: terabytes take minutes, and all ranks would wait.

One at a time, in daemon threads. What the end of the process cuts short, the next attempt finishes.
"""

from __future__ import annotations

import atexit
import shutil
import threading
import time
from functools import cache
from pathlib import Path

from toolkit.talk import say_beside

LAST_DELETIONS_S = 5.0  # at the end of a rank; launchers end ranks that stay much longer than the others
_THREAD = "checkpoint deletion"


def discard(folder: Path) -> None:
    """Delete a folder that is no checkpoint.

    Trouble is told and not raised: what is left costs space and nothing else. NFS, for one, keeps a folder
    as long as a process on this host has one of its files open.
    """
    try:
        if folder.is_symlink():  # what it leads to is not ours
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another attempt deletes it, too, and finishes it
    except OSError as error:
        say_beside(f"{folder} could not be deleted: {error}")


def discard_later(folder: Path) -> None:
    """As `discard`, after those that were given here before; returns at once."""
    earlier = _deletions()

    def work() -> None:
        for thread in earlier:
            thread.join()
        discard(folder)

    _give_time_at_the_end()
    threading.Thread(target=work, name=_THREAD, daemon=True).start()


def discard_at_end(folder: Path) -> None:
    """As `discard_later`, when the process ends; a folder that was renamed meanwhile is not there any more."""
    _give_time_at_the_end()
    atexit.register(discard_later, folder)  # runs before what `_give_time_at_the_end` registered


def _deletions() -> list[threading.Thread]:
    """Those that go on. A fork has none of its parent's, so this needs no lock that a fork could inherit."""
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


@cache
def _give_time_at_the_end() -> None:
    """Where the process ends after a run's last save, nobody comes to finish what it cuts short."""
    atexit.register(await_deletions, LAST_DELETIONS_S)


def await_deletions(timeout_s: float) -> bool:
    """Wait for what `discard_later` was given; False when it takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    threads = _deletions()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
