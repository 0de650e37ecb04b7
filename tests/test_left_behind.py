"""What a test leaves behind: nothing that runs."""

from __future__ import annotations

import subprocess

import pytest


def sleeps() -> bool:
    return subprocess.run(["pgrep", "-f", "^sleep 471147"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def afterwards(wait_until):
    """Named before `toolkit`, and so asked after that was taken down."""
    yield
    wait_until(lambda: not sleeps())


def test_a_run_that_nobody_waits_for_ends_with_its_test(afterwards, toolkit, wait_until) -> None:
    toolkit.submit(toolkit.job("sleep 471147 & wait"))
    wait_until(sleeps, 60)
