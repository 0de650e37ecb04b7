"""The states of a run and of an attempt, and the table that decides what follows an attempt's end.

`docs/contract.md` prints this table, the supervisor follows it, and a test walks every row of it.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ENDINGS", "NEXT_START_BEGAN", "NO_REQUEUE", "Cause", "Next", "RunState", "Verdict", "decide"]


class RunState(StrEnum):
    """The states that `status` prints for a run, in order."""

    CREATED = "created"
    PENDING = "pending"
    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    LOST = "lost"
    UNKNOWN = "unknown"

    @property
    def final(self) -> bool:
        """True if nothing more happens by itself."""
        return self not in _OPEN


_OPEN = {RunState.CREATED, RunState.PENDING, RunState.RUNNING, RunState.CANCELLING, RunState.UNKNOWN}


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    CRASHED = "crashed"
    STALLED = "stalled"
    REFUSED = "refused"
    LAUNCH_FAILED = "launch_failed"
    SUPERVISOR_FAILED = "supervisor_failed"
    SUPERVISOR_LOST = "supervisor_lost"
    NODE_LOST = "node_lost"
    NODE_UNFIT = "node_unfit"
    WALLTIME = "walltime"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    CANCELLED = "cancelled"


class Next(StrEnum):
    """What follows an attempt."""

    END = "end"
    RESTART = "restart"  # new ranks in the same allocation
    REQUEUE = "requeue"  # toolkit requests a new start of the same job from Slurm
    AWAIT = "await_slurm"  # Slurm requeues by itself
    # Another job that starts when this one has ended, if the site has no requeue.
    FOLLOW_UP = "follow_up"


# The decision in a record that the next start wrote for an attempt whose own supervisor could not.
NEXT_START_BEGAN = "another start began"
# Reason recorded when the run may not be requeued; the last repeated job has its own reason.
NO_REQUEUE = "a requeue is not allowed (job.requeue, or no Slurm)"


@dataclass(frozen=True)
class Ending:
    """One row of the table: what follows an attempt that ended by `cause`.

    `budget` is the key of `[restart]` that it spends, "" for none. `with_budget` follows while the budget lasts (and,
    for a requeue, if Slurm can requeue); otherwise the run ends in `final_state` with `exit_code`. None means the exit
    code of the rank that failed first (128 + signal).
    """

    cause: Cause
    when: str
    budget: str
    with_budget: Next
    final_state: RunState
    exit_code: int | None


ENDINGS: dict[Cause, Ending] = {
    row.cause: row
    for row in (
        Ending(Cause.COMPLETED, "every rank left its done marker", "", Next.END, RunState.COMPLETED, 0),
        Ending(Cause.CRASHED, "a rank was killed or failed", "crashes", Next.RESTART, RunState.FAILED, None),
        Ending(Cause.STALLED, "no step for stall_s", "crashes", Next.RESTART, RunState.FAILED, 125),
        Ending(Cause.REFUSED, "a rank refused its input, and would do so again", "", Next.END, RunState.FAILED, None),
        Ending(Cause.LAUNCH_FAILED, "the launcher could not start every rank", "crashes", Next.RESTART, RunState.FAILED, 125),
        Ending(Cause.SUPERVISOR_FAILED, "the supervisor could not continue", "", Next.END, RunState.FAILED, 125),
        Ending(Cause.SUPERVISOR_LOST, "the supervisor vanished; the next start writes this", "preemptions", Next.AWAIT, RunState.LOST, 125),
        Ending(Cause.NODE_LOST, "Slurm reports that a node failed", "preemptions", Next.AWAIT, RunState.FAILED, 125),
        Ending(Cause.NODE_UNFIT, "a node failed the check before the ranks", "crashes", Next.REQUEUE, RunState.FAILED, 125),
        Ending(Cause.WALLTIME, "USR2 with at most warn_s + 90 s left", "walltimes", Next.REQUEUE, RunState.TIMEOUT, 140),
        Ending(Cause.PREEMPTED, "USR2 with more time left, or TERM and Slurm reports preempted", "preemptions", Next.AWAIT, RunState.PREEMPTED, 143),
        Ending(Cause.STOPPED, "control/stop, or INT at the terminal", "", Next.END, RunState.STOPPED, 130),
        Ending(Cause.CANCELLED, "control/cancel, or TERM and Slurm reports cancelled", "", Next.END, RunState.CANCELLED, 143),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The decision after an attempt's end: `exit_code` has a meaning only if `next` is END."""

    cause: Cause
    next: Next
    final_state: RunState
    exit_code: int
    reason: str


def decide(
    cause: Cause,
    *,
    budgets: dict[str, int],
    spent: dict[str, int],
    again: Next | None,
    rank_exit_code: int = 1,
    repeated_without_progress: bool = False,
    cannot_pass: bool = False,
    why_last: str = NO_REQUEUE,
) -> Verdict:
    """Apply the table to one ended attempt.

    `budgets` are the `[restart]` keys (-1 is unlimited), `spent` how often each was spent before this end.
    `again` is how this start may be followed by another one: REQUEUE, FOLLOW_UP if the site has no requeue, None if the
    job or a local run excludes both. `repeated_without_progress` is true if the same failure occurred twice without a
    new step between; a failed launch counts as one only at the third time. `cannot_pass` is true for a failure that
    persists until the user fixes its cause. `why_last` is the reason for the end if `again` is None.
    """
    row = ENDINGS[cause]
    exit_code = rank_exit_code if row.exit_code is None else row.exit_code

    def end(reason: str) -> Verdict:
        return Verdict(cause, Next.END, row.final_state, exit_code, reason)

    if row.with_budget is Next.END:
        return end(row.when)
    if cannot_pass:
        return end("another attempt would fail in the same way")
    if repeated_without_progress:
        times = "three times" if cause is Cause.LAUNCH_FAILED else "twice"
        return end(f"the same failure occurred {times} without a new step")
    follows = row.with_budget
    if follows is not Next.RESTART:
        if again is None:
            return end(why_last)
        follows = Next.FOLLOW_UP if again is Next.FOLLOW_UP else follows
    limit = budgets[row.budget]
    if 0 <= limit <= spent.get(row.budget, 0):
        return end(f"restart.{row.budget} = {limit} is spent")
    left = "unlimited" if limit < 0 else f"{limit - spent.get(row.budget, 0) - 1} left after this"
    return Verdict(cause, follows, row.final_state, exit_code, f"restart.{row.budget}: {left}")
