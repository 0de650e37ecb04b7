"""Deletes removed checkpoints in the background, one at a time: deleting terabytes takes minutes, and ranks would wait.

If the process exits during a deletion, the next attempt finishes it.
"""

import atexit
import shutil
import threading
import time
from functools import cache
from pathlib import Path

from toolkit.terminal.talk import say_beside

LAST_DELETIONS_S = 5.0  # how long an exiting rank may wait; launchers kill ranks that exit much later than the others
_THREAD = "checkpoint deletion"


def discard(folder: Path) -> None:
    """Delete a folder that is not a checkpoint. Only logs errors, as NFS keeps a folder while a file in it is open."""
    try:
        if folder.is_symlink():  # toolkit does not own the target of the link
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another attempt has deleted this folder
    except OSError as error:
        say_beside(f"{folder} could not be deleted: {error}")


def discard_later(folder: Path) -> None:
    """Call `discard` in the background, after earlier deletions have finished."""
    earlier = _deletions()

    def work() -> None:
        for thread in earlier:
            thread.join()
        discard(folder)

    _await_at_exit()
    threading.Thread(target=work, name=_THREAD, daemon=True).start()


def discard_at_end(folder: Path) -> None:
    """Delete a folder when the process exits, unless it was renamed in the meantime."""
    _await_at_exit()
    atexit.register(discard_later, folder)  # runs before the function that `_await_at_exit` registered


def _deletions() -> list[threading.Thread]:
    """Return the running deletion threads, found by name: a fork could inherit the lock of a list while it is held."""
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


@cache
def _await_at_exit() -> None:
    """Wait for deletions at exit: no later attempt would finish those of the last save of a run."""
    atexit.register(await_deletions, LAST_DELETIONS_S)


def await_deletions(timeout_s: float) -> bool:
    """Wait for deletions that `discard_later` started; False if they take longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    threads = _deletions()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
