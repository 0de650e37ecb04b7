"""Patience with the run directory's file system between two attempts: a file server's pause is no reason to end a run."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

T = TypeVar("T")

PAUSE_S = 1.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # waiting makes none


@dataclass(frozen=True)
class Patience:
    """How long the file system is waited for; a second Ctrl-C ends that."""

    request: StopRequest
    seconds: float

    def wait_for(self, act: Callable[[], T]) -> T:
        """Do what needs the run directory, again and again while its file system does not answer.

        Raises:
            OSError: it has no room, or has not answered in time.
        """
        deadline = time.monotonic() + self.seconds
        is_told = False
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno in _NO_ROOM or self.request.kill or time.monotonic() > deadline:
                    raise
                if not is_told:
                    say(f"the run directory does not answer ({error}); it is tried again for {self.seconds:.0f} s")
                is_told = True
            time.sleep(PAUSE_S)
