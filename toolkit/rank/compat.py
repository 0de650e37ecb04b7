"""The few private names of Python that the end of a rank needs."""

from __future__ import annotations

import atexit
import threading


def end_threads() -> None:
    """Wait for threads, and tell those of executors, which wait for work, to end: what the interpreter does first."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Call what was registered with `atexit`, the last first; none is called again."""
    atexit._run_exitfuncs()
