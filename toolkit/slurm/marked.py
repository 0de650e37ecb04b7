"""The user's own jobs in the queue, each with its run or session: toolkit marks a job with the start of its comment."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.slurm.commands import Slurm

_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class MarkedJob:
    """A job of the user: `ids` are all of its ids; it belongs to a run or a session, or is "" for both."""

    job_id: str
    ids: frozenset[str]
    state: str
    run_id: str
    session: str


def marked_jobs(slurm: Slurm) -> list[MarkedJob]:
    """The user's own jobs in the queue, with the run or session that their comments name.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm does not respond.
    """
    rows = slurm.call(["squeue", "--me", "--noheader", f"--format={_SEPARATOR.join(('%F', '%A', '%T', '%k'))}"])
    jobs = []
    for row in rows.splitlines():
        job_id, own_id, state, comment = (row.split(_SEPARATOR, 3) + [""] * 4)[:4]
        mark, _, rest = (comment.split() or [""])[0].partition(":")
        run_id, _, more = rest.partition(":") if mark == "toolkit" else ("", "", "")
        is_session = run_id == "session"
        jobs.append(
            MarkedJob(
                job_id, frozenset((job_id, own_id)), state, "" if is_session else run_id, more if is_session else ""
            )
        )
    return jobs
