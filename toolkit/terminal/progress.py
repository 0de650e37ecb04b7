"""A progress bar without colours, and a process that restores its terminal when a signal ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.progress import ProgressColumn, Task
from rich.text import Text

WIDTH = 30  # letters, without the brackets


def plain_bar(done: float, total: float | None) -> Text:
    """`[######........................]`; empty while the total is unknown."""
    made = min(WIDTH, int(WIDTH * done / total)) if total else 0
    return Text(f"[{'#' * made}{'.' * (WIDTH - made)}]")


class PlainBarColumn(ProgressColumn):
    """`plain_bar` in place of rich's own column."""

    def render(self, task: Task) -> Text:
        """The bar of a task as it is now."""
        return plain_bar(task.completed, task.total)


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
