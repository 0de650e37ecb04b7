"""A rank that is done waits for its own threads, and for nothing else; one that failed leaves at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sampling import sampled

from toolkit.rank import entry
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json

HELD_BACK = """
import os, sys, threading, time
from toolkit.rank.entry import run_rank
threading.Thread(target=time.sleep, args=(40,)).start()  # the interpreter's own end would wait for it
run_rank(os.environ, 0)
"""


@pytest.mark.parametrize(
    ("started", "code"),
    sampled([(["/nowhere/program"], 2), ("leave.py", 7), ("talk.py", 1)], lambda case: case[1] != 1),
)
def test_a_full_disk_does_not_keep_a_rank(run_directory, tmp_path, started, code):
    attempt = claim_attempt(run_directory)
    attempt.errors.rmdir()
    attempt.errors.write_text("")  # nothing can be written below it
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    (tmp_path / "talk.py").write_text("raise SystemExit('no such data')")
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"job": {"entry": started}, "job_directory": str(tmp_path)}))
    environment = {
        **os.environ, "TOOLKIT_RUN_DIR": str(run_directory.path), "TOOLKIT_ATTEMPT": "0", "TOOLKIT_RESOLVED_JOB": str(job),
        "TOOLKIT_WORLD_SIZE": "1", "TOOLKIT_RANKS_PER_NODE": "1", "TOOLKIT_LAUNCHER": "mpirun",
    }  # fmt: skip
    began = time.monotonic()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", HELD_BACK], env=environment, stdout=full, stderr=full, timeout=240, check=False
        )  # fmt: skip
    assert done.returncode == code
    assert time.monotonic() - began < 120


def test_the_message_of_an_exit_is_the_reason_of_the_rank(run_directory, tmp_path):
    attempt = claim_attempt(run_directory)
    message = "bad config: --data missing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "_leave_now", lambda code: (_ for _ in ()).throw(AssertionError(code)))
        patch.setattr(entry, "_run_entry", lambda *_: sys.exit(message))
        patch.setattr(entry, "answer_requests", lambda _: None)
        with pytest.raises(AssertionError, match="1"):
            entry.run_rank(
                {"TOOLKIT_RUN_DIR": str(run_directory.path), "TOOLKIT_ATTEMPT": "0", "TOOLKIT_RESOLVED_JOB": "none"}, 0
            )
    error = read_json(attempt.error_file(0))
    assert (error["kind"], error["reason"], error["exit_code"]) == ("exit", f"exit code 1: {message}", 1)


WITH_THREADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from toolkit.rank.entry import _leave_well

def finish():
    time.sleep(0.3)
    print("finished")

executor = ThreadPoolExecutor(2)  # never shut down, as that of torch.compile
executor.submit(int).result()
threading.Thread(target=finish).start()
_leave_well()
"""


def test_a_rank_that_is_done_waits_for_threads_and_not_for_idle_executors():
    done = subprocess.run(
        [sys.executable, "-c", WITH_THREADS], timeout=240, check=False, capture_output=True, text=True
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
