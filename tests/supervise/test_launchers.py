"""Signals to what a launcher left behind: never to somebody else's process."""

from __future__ import annotations

import os
import subprocess

import pytest

from toolkit.supervise.launchers import end_session


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"], start_new_session=True)


def test_a_number_that_is_another_process_by_now_is_left_alone() -> None:
    other, gone = start_sleeper(), subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    gone.pid = other.pid  # as the kernel may give it away again
    end_session(gone)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    end_session(other)
    assert other.returncode is not None


def test_what_an_ended_launcher_left_in_its_session_is_ended() -> None:
    launcher = subprocess.Popen(["bash", "-c", "sleep 100 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    left = int(launcher.stdout.readline())
    launcher.wait()
    end_session(launcher)
    with pytest.raises(ProcessLookupError):
        while os.getpgid(left) == launcher.pid:
            pass  # until its zombie is collected


def test_a_group_that_may_not_be_signalled_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = start_sleeper()
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", _refuse)
        patch.setattr("toolkit.supervise.launchers.END_S", 0.1)
        end_session(sleeper)
    end_session(sleeper)


def _refuse(_group: int, _number: int) -> None:
    raise PermissionError("Operation not permitted")
