"""Retry file operations in the run directory between attempts, so that a file server outage does not end a run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.rundir.files import is_unwritable
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

T = TypeVar("T")

PAUSE_S = 1.0
ROOM_S = 30.0  # time for the user to free disk space before the record of an attempt's end is lost


@dataclass(frozen=True)
class Retry:
    """Retries for `seconds` if the file system hangs, and `room_seconds` if it is full. A second Ctrl-C ends them."""

    request: StopRequest
    seconds: float
    room_seconds: float = 0.0

    def wait_for(self, act: Callable[[], T]) -> T:
        """Return the result of an action on the run directory; retry it while the file system does not respond.

        Raises:
            OSError: the file system is full, or did not respond in time.
        """
        began = time.monotonic()
        is_told = False
        while True:
            try:
                return act()
            except OSError as error:
                seconds = self.room_seconds if is_unwritable(error) else self.seconds
                if self.request.kill or time.monotonic() - began >= seconds:
                    raise
                if not is_told:
                    problem = "cannot be written" if is_unwritable(error) else "does not respond"
                    say(f"the run directory {problem} ({error}); retrying for up to {seconds:.0f} s")
                is_told = True
            time.sleep(PAUSE_S)
