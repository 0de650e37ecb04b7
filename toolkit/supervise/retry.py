"""Retries of file operations in the run directory between two attempts: a file server's pause must not end a run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.rundir.files import is_unwritable
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

T = TypeVar("T")

PAUSE_S = 1.0
ROOM_S = 30.0  # for the user to free space on a full disk before the end of an attempt is lost


@dataclass(frozen=True)
class Retry:
    """How long to retry for a file system without a response, and for free space on it; a second Ctrl-C ends the retries."""

    request: StopRequest
    seconds: float
    room_seconds: float = 0.0

    def wait_for(self, act: Callable[[], T]) -> T:
        """The result of an action on the run directory, retried while its file system does not respond.

        Raises:
            OSError: it has no free space, or has not responded in time.
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
