"""Retries on the run directory's file system between two attempts: a pause of a file server must not end a run."""

from __future__ import annotations

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
class Patience:
    """How long to wait for the file system, and for free space on it; a second Ctrl-C ends the wait."""

    request: StopRequest
    seconds: float
    room_seconds: float = 0.0

    def wait_for(self, act: Callable[[], T]) -> T:
        """Do what needs the run directory, again and again while its file system does not answer.

        Raises:
            OSError: it has no room, or has not answered in time.
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
                    what = "cannot be written" if is_unwritable(error) else "does not answer"
                    say(f"the run directory {what} ({error}); retrying for {seconds:.0f} s")
                is_told = True
            time.sleep(PAUSE_S)
