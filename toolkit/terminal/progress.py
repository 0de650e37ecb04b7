"""A progress bar without colors, and a context that restores the terminal when a signal ends the process."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.progress import ProgressColumn, Task
from rich.text import Text

__all__ = ["WIDTH", "PlainBarColumn", "given_back", "plain_bar"]

WIDTH = 30  # in characters, without the brackets


def plain_bar(done: float, total: float | None) -> Text:
    """Return a bar such as `[######........................]`; empty while the total is unknown."""
    made = min(WIDTH, int(WIDTH * done / total)) if total else 0
    return Text(f"[{'#' * made}{'.' * (WIDTH - made)}]")


class PlainBarColumn(ProgressColumn):
    """A rich column that shows `plain_bar`."""

    def render(self, task: Task) -> Text:
        """Return the current bar of a task."""
        return plain_bar(task.completed, task.total)


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def given_back() -> Iterator[None]:
    """On SIGTERM and SIGHUP, exit through `finally` blocks, with the exit code that a shell reports for the signal.

    Signals that the program already handles or ignores, as under nohup, are unaffected, and so are other threads.
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
