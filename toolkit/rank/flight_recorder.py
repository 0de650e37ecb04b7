"""Write torch's flight recorder, which has the last collectives of this rank, whenever the guard requests it."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from toolkit.rundir.files import write_text
from toolkit.rundir.layout import AttemptDirectory
from toolkit.terminal.talk import say_beside

__all__ = ["FLIGHT_SIGNAL", "answer_requests"]

FLIGHT_SIGNAL = signal.SIGRTMIN + 8
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo and others; of NCCL


def answer_requests(attempt: AttemptDirectory, rank: int) -> None:
    """Start a thread that waits for requests, if the recorder is on. Call it before other threads start."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0").strip("0"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [FLIGHT_SIGNAL])  # later threads inherit the mask
        threading.Thread(target=_answer, args=(attempt.flight_file(rank),), name="flight", daemon=True).start()


def _answer(path: Path) -> None:
    while signal.sigwait([FLIGHT_SIGNAL]):
        c10d = sys.modules.get("torch._C._distributed_c10d")
        dumps = [json.loads(getattr(c10d, name)()) for name in _DUMPS if hasattr(c10d, name)]
        entries = [entry for dump in dumps for entry in dump["entries"]]
        try:
            write_text(path, json.dumps({"time_ns": time.time_ns(), "entries": entries}))
        except OSError as error:
            say_beside(f"cannot write {path}: {error.strerror}")
