"""Signals are heard while the main thread hangs, and what it starts hears its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from toolkit.rundir.states import Cause
from toolkit.supervise.requests import StopRequest

HANGS = """
import hashlib, os, threading, time
from toolkit.supervise.requests import StopRequest
request = StopRequest()
request.hear_signals()
def tell():
    while not request.came:
        time.sleep(0.01)
    os.write(1, b"heard\\n")
    os._exit(0)
threading.Thread(target=tell).start()
os.write(1, b"ready\\n")
hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # as a hung system call, it lets no handler run
"""


def test_a_main_thread_that_hangs_keeps_no_signal_back() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "heard\n"
        assert time.monotonic() - began < 30  # the hash takes minutes
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_stops_a_job_whose_early_warning_is_held() -> None:
    came = []
    request = StopRequest(may_be_early=lambda: not came.append(request.came))
    request.on_signal(signal.SIGUSR2, None)
    assert came == [False] and not request.came
    request.on_signal(signal.SIGINT, None)
    assert request.cause is Cause.STOPPED and request.came and not request.kill
    request.on_signal(signal.SIGINT, None)
    assert request.kill


STARTS = """
import subprocess
from toolkit.supervise.parent_death import die_with_parent
from toolkit.supervise.requests import StopRequest
StopRequest().hear_signals()
print(subprocess.run(["grep", "SigBlk", "/proc/self/status"], preexec_fn=die_with_parent, stdout=-1, text=True).stdout)
"""


def test_what_the_supervisor_starts_hears_all_signals() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["SigBlk:", "0" * 16]
