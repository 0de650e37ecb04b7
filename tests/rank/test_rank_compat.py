"""The private names of Python that end a rank do what they did, in every Python that this runs on."""

from __future__ import annotations

import subprocess
import sys

ENDING = """
import atexit, os, threading, time
from concurrent.futures import ThreadPoolExecutor
from toolkit.rank.entry import end_threads, run_exit_handlers

pool = ThreadPoolExecutor(1)
pool.submit(print, "worked").result()
threading.Thread(target=lambda: (time.sleep(0.2), print("waited for"))).start()
atexit.register(print, "registered first")
atexit.register(print, "registered last")
end_threads()
print("threads have ended")
run_exit_handlers()
run_exit_handlers()
print(threading.active_count(), flush=True)
os._exit(0)
"""


def test_threads_end_and_handlers_are_called_once() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=240, check=False)
    said = ["worked", "waited for", "threads have ended", "registered last", "registered first", "1"]
    assert (done.stderr, done.stdout.splitlines()) == ("", said)
