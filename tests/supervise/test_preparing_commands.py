"""Commands that prepare a start end with it: a Ctrl-C during ten minutes of staging is heard at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from toolkit.errors import OwnFailureError
from toolkit.supervise.commands import run_command
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.staging import pack

PATHS = {"PATH": "/usr/bin:/bin"}


def test_a_request_ends_a_command_and_what_it_started(tmp_path: Path, wait_until) -> None:
    request = StopRequest()
    script = f"echo so far; sleep 600 & echo $! > {tmp_path}/child; wait"
    timer = threading.Timer(1.0, setattr, [request, "terminated", True])
    timer.start()
    began = time.monotonic()
    done = run_command(["sh", "-c", script], PATHS, timeout_s=60, request=request)
    assert time.monotonic() - began < 30
    assert done.out == "so far\n"
    assert "stop was requested" in done.problem
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    wait_until(lambda: not child.exists() or ") Z " in (child / "stat").read_text())


def test_a_command_says_why_it_failed() -> None:
    request = StopRequest()

    def problem(*argv: str, timeout_s: float = 60) -> str:
        return run_command(argv, PATHS, timeout_s=timeout_s, request=request).problem

    assert problem("true") == ""
    assert problem("sh", "-c", "echo broken >&2; exit 3") == "broken"
    assert problem("sh", "-c", "exit 3") == "sh exited with 3"
    assert problem("sleep", "60", timeout_s=0.3) == "sleep did not finish within 0 s"
    assert problem("/no/such/program") == "cannot start /no/such/program: No such file or directory"


def test_packing_ends_when_the_start_does(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    with pytest.raises(OwnFailureError, match="stop was requested"):
        pack(tmp_path / "env", tmp_path / "cache", StopRequest(interrupted=True, terminated=True))
    assert list((tmp_path / "cache").iterdir()) == []
