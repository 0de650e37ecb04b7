"""`python -m toolkit.trackers TRACKER RUN START`: send the metrics of a run to one tracker until stdin ends.

The supervisor starts one process for each of `observe.trackers`, and writes the state of the run to its stdin at the end.
No rank waits for it; what it did not send, the process of the next start sends.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.trackers.sender import PERIOD_S, send_metrics


def states() -> Iterator[str | None]:
    """Yield None every `PERIOD_S`, and at the end of stdin the state that it contains."""
    while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
        yield None
    yield sys.stdin.read().strip()


if __name__ == "__main__":
    # The end of stdin ends it: Ctrl-C, and what Slurm sends to all processes of a job, only end the run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    name, path, start = sys.argv[1:]
    run = RunDirectory(Path(path))
    code = send_metrics(run, read_json(run.start(int(start)) / "job.json"), name, states(), is_live=True)
    sys.stdout.flush()
    os._exit(code)  # threads of a tracker's package must not keep the process
