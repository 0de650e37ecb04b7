"""The states of runs and attempts, and the table that decides what follows when an attempt ends.

The supervisor follows this table, and `docs/contract.md` contains it. `layout` explains starts and attempts.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ENDINGS", "NEXT_START_BEGAN", "NO_REQUEUE", "Cause", "EndDecision", "Next", "RunState", "decide"]


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
        """True if the state does not change unless the user acts."""
        return self not in _OPEN


_OPEN = {RunState.CREATED, RunState.PENDING, RunState.RUNNING, RunState.CANCELLING, RunState.UNKNOWN}


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    CRASHED = "crashed"
    ENVIRONMENT = "environment"
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
    """What follows after an attempt has ended."""

    END = "end"
    RESTART = "restart"  # toolkit launches new ranks in the same allocation
    REQUEUE = "requeue"  # toolkit requests a new start of the same job from Slurm
    AWAIT = "await_slurm"  # Slurm requeues the job without a request
    FOLLOW_UP = "follow_up"  # on a site without requeue, another job starts when this one has ended


# The decision that the next start records for an attempt whose own supervisor could not write exit.json.
NEXT_START_BEGAN = "another start began"
# The reason recorded if the run may not be requeued; for the last repeated job another reason is recorded.
NO_REQUEUE = "a requeue is not allowed (job.requeue, or no Slurm)"


@dataclass(frozen=True)
class Ending:
    """One row of the table: what follows when an attempt ends due to `cause`.

    `budget` is the `[restart]` key whose limit it counts against, "" for none. Until the limit is reached (and, for a
    requeue, if Slurm can requeue), `with_budget` follows; after that the run ends in `final_state` with `exit_code`.
    None means the exit code of the rank that failed first (128 + signal).
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
        Ending(Cause.COMPLETED, "every rank wrote its done marker", "", Next.END, RunState.COMPLETED, 0),
        Ending(Cause.CRASHED, "a rank was killed or failed", "crashes", Next.RESTART, RunState.FAILED, None),
        Ending(Cause.ENVIRONMENT, "a rank could not import a module or parse its script, before any progress", "", Next.END, RunState.FAILED, None),
        Ending(Cause.STALLED, "no step for stall_s", "crashes", Next.RESTART, RunState.FAILED, 125),
        Ending(Cause.REFUSED, "a rank rejected its input, and would do so again", "", Next.END, RunState.FAILED, None),
        Ending(Cause.LAUNCH_FAILED, "the launcher could not start every rank", "crashes", Next.RESTART, RunState.FAILED, 125),
        Ending(Cause.SUPERVISOR_FAILED, "the supervisor could not continue", "", Next.END, RunState.FAILED, 125),
        Ending(Cause.SUPERVISOR_LOST, "the supervisor vanished; the next start records this", "preemptions", Next.AWAIT, RunState.LOST, 125),
        Ending(Cause.NODE_LOST, "Slurm reports that a node failed", "preemptions", Next.AWAIT, RunState.FAILED, 125),
        Ending(Cause.NODE_UNFIT, "a node failed the health check before the ranks started", "crashes", Next.REQUEUE, RunState.FAILED, 125),
        Ending(Cause.WALLTIME, "SIGUSR2 with at most warn_s + 90 s left", "walltimes", Next.REQUEUE, RunState.TIMEOUT, 140),
        Ending(Cause.PREEMPTED, "SIGUSR2 with more time left, or SIGTERM and Slurm reports preempted", "preemptions", Next.AWAIT, RunState.PREEMPTED, 143),
        Ending(Cause.STOPPED, "control/stop, or SIGINT from the terminal", "", Next.END, RunState.STOPPED, 130),
        Ending(Cause.CANCELLED, "control/cancel, or SIGTERM and Slurm reports cancelled", "", Next.END, RunState.CANCELLED, 143),
    )
}  # fmt: skip


@dataclass(frozen=True)
class EndDecision:
    """The decision after the end of an attempt. `exit_code` is only valid if `next` is END."""

    cause: Cause
    next: Next
    final_state: RunState
    exit_code: int
    reason: str
    fix: str = ""  # if the decision has one of its own


def decide(
    cause: Cause,
    *,
    budgets: dict[str, int],
    spent: dict[str, int],
    again: Next | None,
    rank_exit_code: int = 1,
    why_repeated: str = "",
    cannot_pass: bool = False,
    why_last: str = NO_REQUEUE,
) -> EndDecision:
    """Decide what follows after one attempt has ended, according to the table.

    `budgets` are the `[restart]` limits (-1 is unlimited), `spent` counts how often each was used before this end.
    `again` is how another start can follow this one: REQUEUE, FOLLOW_UP if the site has no requeue, None if the job or
    a local run permits neither. `why_repeated` is the reason to end a run whose attempts fail alike without progress, ""
    if this one did not. `cannot_pass` is true for a failure that recurs until the user fixes
    its cause. `why_last` is the recorded reason if `again` is None.
    """
    row = ENDINGS[cause]
    exit_code = rank_exit_code if row.exit_code is None else row.exit_code

    def end(reason: str) -> EndDecision:
        return EndDecision(cause, Next.END, row.final_state, exit_code, reason)

    if row.with_budget is Next.END:
        return end(row.when)
    if cannot_pass:
        return end("another attempt would fail in the same way")
    if why_repeated:
        return end(why_repeated)
    follows = row.with_budget
    if follows is not Next.RESTART:
        if again is None:
            return end(why_last)
        follows = Next.FOLLOW_UP if again is Next.FOLLOW_UP else follows
    limit = budgets[row.budget]
    if 0 <= limit <= spent.get(row.budget, 0):
        return end(f"restart.{row.budget} = {limit} is spent")
    left = "unlimited" if limit < 0 else f"{limit - spent.get(row.budget, 0) - 1} left after this"
    return EndDecision(cause, follows, row.final_state, exit_code, f"restart.{row.budget}: {left}")
