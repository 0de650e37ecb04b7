"""Determine the progress of a run: step, rate, expected end and walltime, loss, last save, ranks."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from toolkit.errors import NotFoundError
from toolkit.metrics.checkpoints import SaveRecord
from toolkit.metrics.records import last_of
from toolkit.metrics.run_metrics import losses_of, metrics_as_json, newest_metrics, rate_of, recent_records
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import line_of_verdict
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, step_of
from toolkit.rundir.states import RunState
from toolkit.rundir.tail import last_lines
from toolkit.runs.logs.log_choice import LogChoice, choose_logs
from toolkit.runs.logs.logs import for_terminal
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.verdicts import raised_verdicts, unmeasured
from toolkit.slurm.job_facts import JobFacts
from toolkit.terminal.talk import clean

__all__ = ["Progress"]

RECENT_RECORDS = 30  # records for the rate
CURVE_POINTS = 40


@dataclass(frozen=True)
class Progress:
    """A run at one moment. Unknown or meaningless values are None.

    steps_per_s: the rate over the last records of this attempt, including saves.
    ends_in_s: the time until the last step, at this rate.
    walltime_left_s: the time until Slurm ends the allocation.
    losses: samples of the loss over the whole run.
    metrics: the newest value of each metric, the loss included.
    saved_age_s: the time since the end of the last save.
    silent_s: the time since the last change of the heartbeat.
    last_line: the last output of a run that reports no steps.
    verdicts: what is wrong now, the most severe first.
    note: what no verdict can name.
    """

    status: RunStatus
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    ends_in_s: float | None = None
    walltime_left_s: float | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_step: int | None = None
    saved_age_s: float | None = None
    ranks_started: int | None = None
    ranks_failed: int = 0
    silent_s: float | None = None
    last_line: str = ""
    verdicts: tuple[str, ...] = ()
    note: str = ""

    @property
    def spare_s(self) -> float | None:
        """Return the seconds from the expected end to the walltime; negative if the walltime is earlier."""
        if self.ends_in_s is None or self.walltime_left_s is None:
            return None
        return self.walltime_left_s - self.ends_in_s

    def as_json(self) -> str:
        """Return a line of `watch --json`, as docs/contract.md defines it."""
        row: dict[str, Any] = {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"), "run_id": self.status.run_id,
            "job_name": self.status.job_name, "state": self.status.state.value, "reason": self.status.reason,
            "ranks": self.status.ranks,
        }  # fmt: skip
        without = asdict(replace(self, losses=()))
        row |= {name: value for name, value in without.items() if name not in ("status", "losses")}
        row |= metrics_as_json(self.metrics)
        return json.dumps(
            {
                key: round(value, 3) if isinstance(value, float) and key != "loss" else value
                for key, value in row.items()
            }
        )


def progress_of(run: RunDirectory, status: RunStatus, facts: JobFacts | None) -> Progress:
    """Return a run's progress from its own files; `facts` are Slurm's, with the end of the allocation."""
    attempt = run.last_attempt()
    if status.tasks is not None or attempt is None or status.state is RunState.PENDING:
        return Progress(status, attempt=attempt.number if attempt is not None else None, step=status.step)
    now = time.time()
    found = Progress(
        status, attempt=attempt.number, step=status.step, ranks_started=_started(attempt, status.ranks),
        ranks_failed=sum(1 for _ in attempt.errors.glob("rank-*.json")), silent_s=_age_s(attempt, now),
        walltime_left_s=_left_s(facts, now) if not status.state.final else None, **_saved(run, now),
        verdicts=() if status.state.final else tuple(map(line_of_verdict, raised_verdicts(run))),
        note="" if status.state.final else unmeasured(run),
    )  # fmt: skip
    newest, recent = newest_metrics(run.metrics), recent_records(run.metrics, RECENT_RECORDS)
    printed = _printed(attempt, status)
    if newest is None or not recent:
        return replace(found, **printed, last_line="" if "steps_per_s" in printed else _last_line(run))
    curve = [*losses_of(run.metrics, CURVE_POINTS), *([] if newest.loss is None else [newest.loss])]
    found = replace(found, steps=newest.steps, loss=newest.loss, losses=tuple(curve), metrics=newest.values)
    if newest.steps is None and any(printed.values()):
        return replace(found, **printed)
    if newest.attempt != attempt.number or status.state.final:  # an earlier attempt may have had another rate
        return found
    last, rate = recent[-1], rate_of([one for one in recent if one.attempt == attempt.number])
    if rate is None or not isinstance(last, TrainRecord):
        return replace(found, steps_per_s=rate)
    left = max(0, last.steps - max(last.step, status.step or 0))
    return replace(
        found, steps_per_s=rate, tokens_per_s=last.tokens_per_s if last.tokens else None, ends_in_s=left / rate
    )


def _printed(attempt: AttemptDirectory, status: RunStatus) -> dict[str, Any]:
    """Return what the heartbeat of a program whose steps are read from its output adds to the step."""
    beat = read_json_or_none(attempt.heartbeat) or {}
    steps, rate = beat.get("total"), beat.get("steps_per_s")
    if status.state.final or not rate:
        return {"steps": steps}
    left = max(0, steps - beat["step"]) if steps is not None else None
    return {"steps": steps, "steps_per_s": rate, "ends_in_s": left / rate if left is not None else None}


def _started(attempt: AttemptDirectory, ranks: int) -> int:
    """Return the number of started ranks; after the first step, all have started, and no files need to be listed."""
    return ranks if attempt.heartbeat.exists() else sum(1 for _ in attempt.ranks.glob("rank-*.json"))


def _age_s(attempt: AttemptDirectory, now: float) -> float | None:
    try:
        return max(0.0, now - attempt.heartbeat.stat().st_mtime)
    except FileNotFoundError:
        return None


def _left_s(facts: JobFacts | None, now: float) -> float | None:
    try:
        return max(0.0, datetime.fromisoformat(facts.end_time).timestamp() - now) if facts is not None else None
    except ValueError:  # Slurm reports "N/A" for a job without a limit
        return None


def _saved(run: RunDirectory, now: float) -> dict[str, Any]:
    committed = run.committed_checkpoints()
    if not committed:
        return {}
    last = last_of(run.metrics / "checkpoints.jsonl", SaveRecord.from_line)
    known = last is not None and last.step == step_of(committed[-1])
    return {
        "saved_step": step_of(committed[-1]),
        "saved_age_s": max(0.0, now - last.ended_at) if known and last is not None else None,
    }


def _last_line(run: RunDirectory) -> str:
    """Return the last line of the log of rank 0, or else of the job log; "" if there is none yet."""
    for choice in (LogChoice(rank="0"), LogChoice()):
        with suppress(NotFoundError):
            part = choose_logs(run, choice)[-1]
            for line in last_lines(part.path, 1, shown=part.shown, unfinished=True).lines:
                return clean(for_terminal(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")))
    return ""
