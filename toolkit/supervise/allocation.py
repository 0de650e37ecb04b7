"""What the supervisor knows of its allocation: the job id, the nodes, the end, and why Slurm wants it gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.states import Cause
from toolkit.slurm.commands import Slurm
from toolkit.slurm.states import base_state


def process_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), stat field 22): tells a reused pid apart.

    Raises:
        ProcessLookupError: there is no such process, or only its unread exit code is left.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


@dataclass(frozen=True)
class Allocation:
    """Where the supervisor lives. `job_id` is `local-<pid>` without Slurm; `ends_at` is 0 without a time limit."""

    job_id: str
    nodes: int
    in_slurm: bool
    is_batch: bool
    ends_at: float

    def left_s(self) -> float:
        """Seconds until the end, infinite without a limit."""
        return self.ends_at - time.time() if self.ends_at else float("inf")

    @property
    def can_requeue(self) -> bool:
        """Only a batch job can be requeued, and only by `scontrol`."""
        return self.in_slurm and self.is_batch and shutil.which("scontrol") is not None


def find_allocation(environ: Mapping[str, str], nodes: int) -> Allocation:
    """Read the allocation from Slurm's variables; `nodes` is what the job asks for, used where there is none."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id or environ.get("TOOLKIT_LOCAL"):
        return Allocation(f"local-{os.getpid()}", nodes, in_slurm=False, is_batch=False, ends_at=0.0)
    given = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or nodes)
    # salloc's shell and srun's tasks have the job's variables too; only a batch script is requeued.
    is_batch = environ.get("TOOLKIT_IN_ALLOCATION", "") == ""
    return Allocation(job_id, given, True, is_batch, _end_time(job_id, environ))


def _end_time(job_id: str, environ: Mapping[str, str]) -> float:
    if environ.get("SLURM_JOB_END_TIME"):
        return float(environ["SLURM_JOB_END_TIME"])
    end = _shown(job_id).get("EndTime", "Unknown")  # as Slurm's local time, which is this host's
    return 0.0 if end in ("Unknown", "None", "N/A") else datetime.fromisoformat(end).timestamp()


def why_terminated(job_id: str) -> Cause:
    """Ask Slurm why it sent TERM. A job that is merely being preempted still counts as running there."""
    state = base_state(_shown(job_id).get("JobState", ""))
    if state == "CANCELLED":
        return Cause.CANCELLED
    if state in ("TIMEOUT", "DEADLINE"):
        return Cause.WALLTIME
    return Cause.PREEMPTED


def _shown(job_id: str) -> dict[str, str]:
    try:
        text = Slurm(timeout_s=10).call(["scontrol", "--oneliner", "show", "job", job_id])
    except (NotFoundError, SchedulerRefusedError) as error:
        print(f"toolkit: Slurm does not say: {error}", flush=True)  # noqa: T201
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
