"""How far a run comes: the last step of an attempt, and whether a failure was repeated without a new one."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import ToolkitError
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.log import say


def last_step(attempt: AttemptDirectory) -> int | None:
    """The last step that rank 0 wrote down; None before the first.

    The heartbeat comes at most once a second, so in fast loops the metrics are ahead of it; where a lost node left half
    of it, they are all there is.
    """
    steps = []
    try:
        beat = read_json_or_none(attempt.heartbeat)
        steps += [int(beat["step"])] if beat is not None else []
    except ToolkitError as error:  # the supervisor does not wait for the file
        say(f"the last heartbeat of attempt {attempt.number} is not known: {error}")
    record = last_record(attempt.run.metrics / "train.jsonl")
    if record is not None and record.attempt == attempt.number:
        steps.append(record.step)
    return max(steps, default=None)


def is_repeated(earlier: Sequence[AttemptRecord], end: AttemptEnd, cause: Cause, *, tells_steps: bool) -> bool:
    """True when an attempt ended as the one before it did, and came no further than any of the earlier ones.

    A launch that failed is tried twice more.

    Args:
        earlier: ends of the attempts since the last resume.
        cause: why it ended, as Slurm says.
        tells_steps: the job reports its steps; where none are known, its budgets alone count.
    """
    if not earlier or _has_new_step(earlier, end.step) or earlier[-1].cause is not cause:
        return False
    if cause is Cause.LAUNCH_FAILED:  # an old step on a node may take a while to end
        return [one.cause for one in earlier[-2:]] == [cause] * 2
    if cause is Cause.CRASHED:
        return tells_steps and (earlier[-1].rank, earlier[-1].reason) == (end.rank, end.reason)
    if cause is Cause.WALLTIME:  # a start or a save that takes longer than there is time would be repeated for ever
        return tells_steps
    return cause is Cause.STALLED  # its words say where each rank stood, and differ


def _has_new_step(earlier: Sequence[AttemptRecord], step: int | None) -> bool:
    reached = [one.step for one in earlier if one.step is not None]
    return step is not None and step > max(reached, default=-1)
