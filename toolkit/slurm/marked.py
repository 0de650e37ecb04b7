"""The user's own jobs in the queue, and whose they are: what submits them leaves its mark as the first word of the comment."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.slurm.commands import Slurm

_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class MarkedJob:
    """A job of the user's own: `ids` are all ids that it goes by; it is of a run, or of a session, or "" of neither."""

    job_id: str
    ids: frozenset[str]
    state: str
    run_id: str
    session: str


def marked_jobs(slurm: Slurm) -> list[MarkedJob]:
    """The user's own jobs in the queue, with what their comments say of them.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm does not answer.
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
