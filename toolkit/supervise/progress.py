"""The progress of a run: the last step of an attempt, and whether a failure was repeated without a new step."""

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
    """The last step that rank 0 recorded; None before the first.

    The heartbeat is written at most once a second, so in fast loops the metrics are ahead of it; if a lost node left
    half of it, the metrics are all there is.
    """
    steps = []
    try:
        beat = read_json_or_none(attempt.heartbeat)
        steps += [int(beat["step"])] if beat is not None else []
    except ToolkitError as error:  # it is written without fsync
        say(f"the last heartbeat of attempt {attempt.number} is unknown: {error}")
    record = last_record(attempt.run.metrics / "train.jsonl")
    if record is not None and record.attempt == attempt.number:
        steps.append(record.step)
    return max(steps, default=None)


def is_repeated(earlier: Sequence[AttemptRecord], end: AttemptEnd, cause: Cause, *, tells_steps: bool) -> bool:
    """True if an attempt ended as the one before it did, and reached no further step than the earlier ones.

    A failed launch is tried twice more.

    Args:
        earlier: ends of the attempts since the last resume.
        cause: why it ended, according to Slurm.
        tells_steps: the job reports its steps; if they are unknown, only its budgets count.
    """
    if not earlier or _has_new_step(earlier, end.step) or earlier[-1].cause is not cause:
        return False
    if cause is Cause.LAUNCH_FAILED:  # an old step on a node may take a while to end
        return [one.cause for one in earlier[-2:]] == [cause] * 2
    if cause is Cause.CRASHED:
        return tells_steps and (earlier[-1].rank, earlier[-1].reason) == (end.rank, end.reason)
    if cause is Cause.WALLTIME:  # a start or a save that takes longer than there is time would be repeated for ever
        return tells_steps
    return cause is Cause.STALLED  # its reason contains each rank's position, which differs


def _has_new_step(earlier: Sequence[AttemptRecord], step: int | None) -> bool:
    reached = [one.step for one in earlier if one.step is not None]
    return step is not None and step > max(reached, default=-1)
