"""How many of a run's steps counted: those that a later attempt went back over were made twice."""

from __future__ import annotations

from toolkit.metrics.checkpoints import read_save_log
from toolkit.metrics.records import read_records
from toolkit.metrics.training import TrainRecord
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.efficiency.report import StepsMade


def steps_made(run: RunDirectory) -> StepsMade | None:
    """None if a run reports no steps, or if the first step of an attempt is unknown."""
    reached = _reached(run)
    if not reached:
        return None
    began = _began(run)
    if any(number not in began for number in reached):
        return None
    made = sum(max(0, step - began[number]) for number, step in reached.items())
    first, last = min(reached), max(reached)
    return StepsMade(made, max(0, reached[last] - began[first])) if made else None


def _reached(run: RunDirectory) -> dict[int, int]:
    """The last step of each attempt that made one."""
    reached: dict[int, int] = {}
    for attempt in map(run.attempt, run.attempt_numbers()):
        end, beat = AttemptRecord.read(attempt), read_json_or_none(attempt.heartbeat)
        steps = [int(beat["step"])] if beat is not None else []
        steps += [end.step] if end is not None and end.step is not None else []
        if steps:
            reached[attempt.number] = max(steps)
    return reached


def _began(run: RunDirectory) -> dict[int, int]:
    """The step from which each attempt resumed: that of the newest save before its first record, else the one before that record."""
    path = run.metrics / "train.jsonl"
    records = list(read_records(path, TrainRecord.from_line, what="training")) if path.exists() else []
    if not records and len(run.attempt_numbers()) == 1:
        return {run.attempt_numbers()[0]: 0}
    saves = [save for save in read_save_log(run.metrics / "checkpoints.jsonl") if save.error is None]
    of_attempt: dict[int, list[int]] = {}
    for record in records:
        of_attempt.setdefault(record.attempt, []).append(record.step)
    began: dict[int, int] = {}
    for number, steps in of_attempt.items():
        saved = [save.step for save in saves if save.attempt < number and save.step < steps[0]]
        period = steps[1] - steps[0] if len(steps) > 1 else 1  # `log_every`
        began[number] = max([*saved, steps[0] - max(1, period), 0])
    return began
