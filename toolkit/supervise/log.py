"""The supervisor's messages in the job's log, which is its stdout."""

import os
import stat
from pathlib import Path

from toolkit.rundir.files import is_unwritable
from toolkit.terminal.talk import plain

_OUTPUT = Path("/proc/self/fd/1")


def say(text: str) -> None:
    """Print one line to the job's log."""
    try:
        print(("\n" if _is_within_a_line() else "") + plain(f"toolkit: {text}"), flush=True)  # noqa: T201
    except OSError as error:
        if not is_unwritable(error):  # a full disk must not end the job just because it cannot be logged
            raise


def _is_within_a_line() -> bool:
    """Return whether stdout is a file that ends within a line, as after the output of a script without a newline."""
    try:
        found = _OUTPUT.stat()
        if not stat.S_ISREG(found.st_mode) or not found.st_size:
            return False
        with _OUTPUT.open("rb") as log:
            log.seek(-1, os.SEEK_END)
            return log.read(1) != b"\n"
    except OSError:  # stdout is closed, or this user may only write to the file
        return False
