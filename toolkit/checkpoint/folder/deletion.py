"""Deletes removed checkpoints in the background, one at a time: terabytes take minutes, and all ranks would wait.

The next attempt finishes the deletions that the exit of the process interrupts.
"""

import atexit
import shutil
import threading
import time
from functools import cache
from pathlib import Path

from toolkit.terminal.talk import say_beside

LAST_DELETIONS_S = 5.0  # at the exit of a rank; launchers kill ranks that run much longer than the others
_THREAD = "checkpoint deletion"


def discard(folder: Path) -> None:
    """Delete a folder that is not a checkpoint; logs errors (NFS keeps a folder while a file in it is open)."""
    try:
        if folder.is_symlink():  # its target is not ours
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another attempt deletes it, too
    except OSError as error:
        say_beside(f"{folder} could not be deleted: {error}")


def discard_later(folder: Path) -> None:
    """Like `discard`, in the background, after earlier deletions."""
    earlier = _deletions()

    def work() -> None:
        for thread in earlier:
            thread.join()
        discard(folder)

    _await_at_exit()
    threading.Thread(target=work, name=_THREAD, daemon=True).start()


def discard_at_end(folder: Path) -> None:
    """Like `discard_later`, when the process exits, unless the folder was renamed in the meantime."""
    _await_at_exit()
    atexit.register(discard_later, folder)  # runs before what `_await_at_exit` registered


def _deletions() -> list[threading.Thread]:
    """The running deletions. A fork has none of its parent's, so this needs no lock that a fork could inherit."""
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


@cache
def _await_at_exit() -> None:
    """Wait for deletions at exit: after a run's last save no later attempt finishes them."""
    atexit.register(await_deletions, LAST_DELETIONS_S)


def await_deletions(timeout_s: float) -> bool:
    """Wait for the deletions of `discard_later`; False if they take longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    threads = _deletions()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
