"""Write torch's flight recorder, which has the last collectives of this rank, whenever the guard requests it."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from toolkit.rundir.files import write_text
from toolkit.terminal.talk import say_beside

__all__ = ["FLIGHT_SIGNAL", "answer_requests"]

FLIGHT_SIGNAL = signal.SIGRTMIN + 8


def answer_requests(path: Path) -> None:
    """Start a thread that waits for requests, if the recorder is on. Call it before other threads start."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0").strip("0"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [FLIGHT_SIGNAL])  # later threads inherit the mask
        threading.Thread(target=_answer, args=(path,), name="flight", daemon=True).start()


def _answer(path: Path) -> None:
    while signal.sigwait([FLIGHT_SIGNAL]):
        c10d, entries = sys.modules.get("torch._C._distributed_c10d"), []
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # of gloo and others; of NCCL
            if hasattr(c10d, name):
                entries += json.loads(getattr(c10d, name)())["entries"]
        try:
            write_text(path, json.dumps({"time_ns": time.time_ns(), "entries": entries}))
        except OSError as error:
            say_beside(f"cannot write {path}: {error.strerror}")
