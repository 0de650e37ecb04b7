"""Report once that a job with GPUs computes on the CPU: in the log of rank 0, and for `toolkit status`."""

import os
from collections.abc import Mapping
from typing import Any

from toolkit.rundir.files import read_json, write_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.terminal.talk import say
from toolkit.world.device import visible_gpus

NOTE = "no GPU found, rank 0 computes on the CPU"


def report_missing_gpu(job: Mapping[str, Any], attempt: AttemptDirectory) -> None:
    """Report it if the job has GPUs, but rank 0, which calls this, sees none."""
    if not job["job"].get("gpus_per_node") or visible_gpus(os.environ):
        return
    say(NOTE)
    path = attempt.rank_file(0)
    write_json(path, {**read_json(path), "note": NOTE}, durable=False)
