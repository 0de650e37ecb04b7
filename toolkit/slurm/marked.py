"""List the user's own jobs in the queue with their run or session, which toolkit writes at the start of the comment."""

from dataclasses import dataclass

from toolkit.slurm.commands import Slurm

__all__ = ["MarkedJob", "marked_jobs"]

_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class MarkedJob:
    """A job of the user with all its ids, and its run or session ("" if toolkit did not submit it)."""

    job_id: str
    ids: frozenset[str]
    state: str
    run_id: str
    session: str


def marked_jobs(slurm: Slurm) -> list[MarkedJob]:
    """Return the user's own jobs in the queue, with the run or session in their comments; errors as in `Slurm.call`."""
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
