"""What a test leaves behind: no process that it started."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def test_a_run_that_a_test_does_not_wait_for_ends_with_the_test(toolkit, wait_until) -> None:
    pid_file = toolkit.folder / "sleep.pid"
    toolkit.submit(toolkit.job(f"sleep 1000 & echo $! > {pid_file}; wait"))
    wait_until(lambda: is_alive(pid_file))
    toolkit.end_runs()  # what the fixture does after each test
    wait_until(lambda: not is_alive(pid_file))
    assert not is_alive(pid_file)
