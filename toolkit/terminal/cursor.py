"""What draws on a terminal hides its cursor; TERM and a lost connection must give it back, as the end and Ctrl-C do."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def given_back() -> Iterator[None]:
    """Within, TERM and HUP end this process through its `finally`s, with the exit code that a shell gives a signal.

    What the program handles or ignores itself, as below nohup, stays so; only a main thread can have handlers at all.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
