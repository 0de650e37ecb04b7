"""Streams that are closed, full, or of a terminal with ASCII alone: no traceback, and no letters that it cannot show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import sampled

PROGRAM = str(Path(sys.executable).with_name("toolkit"))


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which `toolkit` is ours."""
    path = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("toolkit site list >&-", 0), ("toolkit history >&-", 0), ("toolkit timeline last >&-", 4),
        ("toolkit submti <&- >&- 2>&-", 2),
    ],
)  # fmt: skip
def test_a_closed_stream_is_as_dev_null(toolkit, line: str, code: int) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["history", "config schema job", "jobs"])
def test_a_full_stdout_is_said_to_be_it(toolkit, words: str, unbuffered: str) -> None:
    done = shell(f"toolkit {words} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        2, "toolkit: stdout: No space left on device. Fix: free space there, or redirect the output elsewhere\n",
    )  # fmt: skip


def test_what_was_done_is_done_for_all_and_told_where_stdout_takes_nothing(toolkit, wait_until) -> None:
    job = toolkit.job("sleep 100")
    done = [shell(f"toolkit submit {job} >/dev/full") for _ in range(2)]
    told = [one.stderr.splitlines() for one in done]
    assert [one.returncode for one in done] == [2, 2], told
    runs = [lines[-2].split()[2] for lines in told]
    assert all(lines[-2].startswith("toolkit: run ") and " is job local-" in lines[-2] for lines in told), told
    cancelled = shell(f"toolkit cancel {' '.join(runs)} nobody >/dev/full")
    assert cancelled.returncode == 2 and "stdout: No space left" in cancelled.stderr
    wait_until(lambda: toolkit.ok("status", *runs).count(" cancelled ") == 2)


def test_the_exit_code_stays_where_nobody_can_be_told(toolkit) -> None:
    assert shell("toolkit submti 2>/dev/full", PYTHONUNBUFFERED="").returncode == 2


@pytest.mark.parametrize(
    ("environment", "plain"),
    sampled([
        ({"LC_ALL": "C"}, True), ({"LC_ALL": "", "LC_CTYPE": "", "LANG": "C"}, True),
        ({"LC_ALL": "C.UTF-8"}, False), ({"LC_ALL": "C.UTF-8", "NO_COLOR": "1"}, True),
    ], lambda case: len(case[0]) == 1),
)  # fmt: skip
def test_a_locale_without_utf_8_gets_a_plain_timeline(toolkit, environment: dict[str, str], plain: bool) -> None:
    run = toolkit.submit(toolkit.job("true"), "--wait")
    done = shell(f"toolkit timeline {run.run_id}", **{"NO_COLOR": "", "PYTHONUTF8": "", **environment})
    assert (done.returncode, done.stdout.isascii()) == (0, plain), done


def test_watch_draws_plainly_without_colours(toolkit, terminal) -> None:
    run = toolkit.submit(toolkit.job("echo begun; sleep 1"))
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    screen = terminal([PROGRAM, "watch", run.run_id], cwd=toolkit.folder, env=environment)
    assert screen.wait() == 0
    assert "completed" in screen.screen and screen.screen.isascii()
    assert "\x1b[1m" not in screen.screen and "\x1b[2m" not in screen.screen
