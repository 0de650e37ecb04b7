"""What Slurm still knows of a job that has ended, and who cancelled it where accounts are kept."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.slurm.commands import Slurm
from toolkit.slurm.states import base_state

_SEPARATOR = "\x1f"
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)")


@dataclass(frozen=True)
class EndedJob:
    """Slurm's own words for the end of a job; `cancelled_by` is a user's number, None where nobody knows."""

    job_id: str
    state: str
    reason: str
    exit_code: str
    nodes: str
    source: str
    cancelled_by: int | None = None

    def as_line(self) -> str:
        """The job's row as a quotation."""
        by = f" by {self.cancelled_by}" if self.cancelled_by is not None else ""
        return " ".join(
            word for word in (self.job_id, self.state + by, self.reason, self.exit_code, self.nodes) if word
        )


def ended_job(slurm: Slurm, job_id: str) -> EndedJob | None:
    """sacct where accounts are kept, for it alone says by whom; else squeue, else None.

    A silent Slurm is None here: `run_status` has said so already.
    """
    queued = _by_squeue(slurm, job_id)
    accounted = _by_sacct(slurm, job_id)
    if queued is None or accounted is None:
        return queued or accounted
    # squeue has the reason, sacct the user; sacct may lag behind.
    if accounted.state == queued.state:
        return EndedJob(
            job_id,
            queued.state,
            queued.reason,
            accounted.exit_code,
            queued.nodes,
            "sacct",
            accounted.cancelled_by,
        )
    return queued


def _by_squeue(slurm: Slurm, job_id: str) -> EndedJob | None:
    form = _SEPARATOR.join(("%i", "%T", "%r", "%N"))
    rows = _rows(slurm, ["squeue", "--noheader", "--states=all", f"--format={form}", f"--jobs={job_id}"], 4)
    return EndedJob(job_id, base_state(rows[0][1]), rows[0][2], "", rows[0][3], "squeue") if rows else None


def _by_sacct(slurm: Slurm, job_id: str) -> EndedJob | None:
    if shutil.which("sacct") is None:
        return None
    argv = ["sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations",
            "--format=JobID,State,ExitCode,NodeList,Reason", f"--jobs={job_id}"]  # fmt: skip
    rows = _rows(slurm, argv, 5)
    if not rows:
        return None
    _, state, code, nodes, reason = rows[-1]
    by = _CANCELLED_BY.search(state)
    return EndedJob(job_id, base_state(state), reason, code, nodes, "sacct", int(by[1]) if by else None)


def _rows(slurm: Slurm, argv: list[str], width: int) -> list[list[str]]:
    try:
        text = slurm.call(argv)
    except (NotFoundError, SchedulerRefusedError):  # forgotten, or no accounts are kept
        return []
    rows = ([cell.strip() for cell in line.split(_SEPARATOR)] for line in text.splitlines())
    return [
        ["" if cell in ("None", "(null)", "None assigned") else cell for cell in row]
        for row in rows
        if len(row) == width
    ]
