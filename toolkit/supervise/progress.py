"""The progress of a run: the last step of an attempt, and whether a failure recurred without progress."""

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
    """Return the last step that rank 0 recorded; None if it has not recorded one yet.

    The heartbeat is written at most once a second, so in fast loops the metrics are ahead of it. If a lost node left a
    truncated heartbeat, only the metrics count.
    """
    steps = []
    try:
        beat = read_json_or_none(attempt.heartbeat)
        steps += [int(beat["step"])] if beat is not None else []
    except ToolkitError as error:  # a lost node may truncate the heartbeat, written without fsync
        say(f"cannot read the last heartbeat of attempt {attempt.number}: {error}")
    record = last_record(attempt.run.metrics / "train.jsonl")
    if record is not None and record.attempt == attempt.number:
        steps.append(record.step)
    return max(steps, default=None)


def is_repeated(earlier: Sequence[AttemptRecord], end: AttemptEnd, cause: Cause, *, tells_steps: bool) -> bool:
    """Return whether an attempt ended like the previous one, and reached no further step than the earlier ones.

    A failed launch is retried twice, so only the third one in a row counts as repeated.

    Args:
        earlier: ends of the attempts since the last resume.
        cause: why the attempt ended, according to Slurm.
        tells_steps: True if the job reports its steps; otherwise only the budgets limit crashes and walltimes.
    """
    if not earlier or _has_new_step(earlier, end.step) or earlier[-1].cause is not cause:
        return False
    if cause is Cause.LAUNCH_FAILED:  # Slurm may take a while to end an old step on a node
        return [one.cause for one in earlier[-2:]] == [cause] * 2
    if cause is Cause.CRASHED:
        return tells_steps and (earlier[-1].rank, earlier[-1].reason) == (end.rank, end.reason)
    if cause is Cause.WALLTIME:  # a start-up or save that exceeds the walltime would be repeated forever
        return tells_steps
    return cause is Cause.STALLED


def _has_new_step(earlier: Sequence[AttemptRecord], step: int | None) -> bool:
    reached = [one.step for one in earlier if one.step is not None]
    return step is not None and step > max(reached, default=-1)
