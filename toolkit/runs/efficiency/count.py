"""Measure what a run used, from Slurm's accounting if available, and from the samples in its own files."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError, ToolkitError, counted
from toolkit.metrics.checkpoints import read_save_log
from toolkit.metrics.records import read_records
from toolkit.metrics.training import TrainRecord
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.task_files import read_usage
from toolkit.runs.efficiency.advice import advice_for
from toolkit.runs.efficiency.report import Efficiency, GpuUsage, Share, StepsMade, TaskUsage
from toolkit.runs.record.job import Request, jobs_of_starts, recorded_job, request_of, slurm_of, uses_slurm
from toolkit.runs.status.state import run_status
from toolkit.runs.status.state_table import state_phrase
from toolkit.slurm.accounted_usage import AccountedLife, accounted_usage
from toolkit.supervise.shape import Shape, shape_of_job
from toolkit.terminal.talk import say

__all__ = ["efficiency_of"]


@dataclass(frozen=True)
class Life:
    """The duration and the resources of one start of a run, or of one execution of a Slurm job."""

    elapsed_s: float
    limit_s: float | None
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int | None = None  # on each node


@dataclass(frozen=True)
class Part:
    """A run or task: its starts, and the samples of each node in all attempts (`nodes`) and the last one (`last`)."""

    run: RunDirectory
    lives: Sequence[Life]
    nodes: Sequence[dict[str, Any]]
    last: Sequence[dict[str, Any]]

    @property
    def cpu_s(self) -> float:
        return sum(float(one["cpu_s"]) for one in self.nodes)

    @property
    def given_cpu_s(self) -> float:
        return sum(life.elapsed_s * life.cpus for life in self.lives)

    @property
    def memory_peak_bytes(self) -> float:
        return max((float(one["memory_peak_bytes"]) for one in self.nodes), default=0.0)


def part_of(run: RunDirectory, asked: Mapping[int, Sequence[Request]]) -> Part:
    """Read the use from the files of a run or task. `asked` maps the first start of a submission to its requests."""
    attempts = {run.attempt(number): usage_of(run.attempt(number)) for number in run.attempt_numbers()}
    nodes = [one for usage in attempts.values() for one in usage]
    last = list(attempts.values())[-1] if attempts else []
    return Part(run, list(_lives(run, asked, attempts)), nodes, last)


def usage_of(attempt: AttemptDirectory) -> list[dict[str, Any]]:
    """Return the samples of each node of an attempt.

    If the guard process of the first rank on a node did not see all of its ranks (containers hide them, others may have
    exited before the only sample), the missing ones are assumed to be like those that it saw.
    """
    begun = StartRecord.read(attempt)
    if begun is None:
        return []
    job = read_json_or_none(RunDirectory(attempt.path.parents[1]).start(begun.start) / "job.json")
    shape = Shape.of(1, max(1, begun.ranks // begun.nodes)) if job is None else shape_of_job(job)
    found = read_usage(attempt, _leave_out)
    return [_of_all_ranks(usage, shape.component_of(usage["first_rank"]).ranks_per_node) for usage in found]


def _leave_out(error: ToolkitError) -> None:
    say(f"omitted: {error.where}: {error.message}")


def _of_all_ranks(usage: dict[str, Any], on_node: int) -> dict[str, Any]:
    times = on_node / max(1, min(usage["ranks"], on_node))
    counts = ("cpu_s", "cpus_peak", "memory_peak_bytes", "memory_mean_bytes")
    return {**usage, **{name: usage[name] * times for name in counts}}


def _lives(
    run: RunDirectory, asked: Mapping[int, Sequence[Request]], attempts: dict[AttemptDirectory, list[dict[str, Any]]]
) -> Iterator[Life]:
    """Yield each start from its claim to its end; without an end, to the last change of its files."""
    last_of_start: dict[int, StartRecord] = {}
    seen: dict[int, list[str]] = {}
    for attempt, usage in attempts.items():
        begun, ended = StartRecord.read(attempt), AttemptRecord.read(attempt)
        if begun is not None:
            times = [begun.time, *([ended.time] if ended else []), *(one["time"] for one in usage)]
            seen.setdefault(begun.start, []).extend(times)
            last_of_start[begun.start] = begun
    for number in run.start_numbers():
        claim, end = read_claim(run, number), read_json_or_none(run.start(number) / "end.json")
        begun = last_of_start.get(number)
        if claim is None or begun is None:
            continue
        over = end["time"] if end is not None else max(seen[number])
        elapsed_s = max(0.0, (datetime.fromisoformat(over) - datetime.fromisoformat(claim.claimed)).total_seconds())
        requests = asked[max(first for first in asked if first <= number)]
        nodes = [begun.nodes] if len(requests) == 1 else [request.min_nodes for request in requests]
        cpus = sum(count * request.cpus_per_node for count, request in zip(nodes, requests, strict=True))
        gpus = sum(count * request.gpus_per_node for count, request in zip(nodes, requests, strict=True))
        yield Life(elapsed_s, requests[0].time_s, sum(nodes), cpus, gpus)


def steps_made(run: RunDirectory) -> StepsMade | None:
    """Return the number of completed steps; None if the run reports none, or if the first step of an attempt is unknown."""
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
    """Return the last step of each attempt that made at least one, by attempt number."""
    reached: dict[int, int] = {}
    for attempt in map(run.attempt, run.attempt_numbers()):
        end, beat = AttemptRecord.read(attempt), read_json_or_none(attempt.heartbeat)
        steps = [int(beat["step"])] if beat is not None else []
        steps += [end.step] if end is not None and end.step is not None else []
        if steps:
            reached[attempt.number] = max(steps)
    return reached


def _began(run: RunDirectory) -> dict[int, int]:
    """Return the step from which each attempt resumed: the newest save before its first record, or the step before."""
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


def efficiency_of(run: RunDirectory) -> Efficiency:
    """Return what a run has used so far; the tasks of an array together.

    Raises:
        CheckFailedError: it has not started, or nothing was sampled.
    """
    job, status = recorded_job(run), run_status(run)
    requests = [request_of(one) for one in job.components]
    request = requests[0]
    asked = {first: [request_of(one) for one in of_then.components] for first, of_then in jobs_of_starts(run).items()}
    parts = [part_of(one, asked) for one in [run.task(number) for number in run.task_numbers()] or [run]]
    accounted = _accounted(run, job)
    lives = [_of_accounting(life) for life in accounted] or [life for part in parts for life in part.lives]
    if not lives:
        fix = f"`toolkit preflight {shlex.quote(str(run.job_file))}` estimates its cost"
        raise CheckFailedError(f"run {run.run_id} {state_phrase(status.state)}, and it has never started", fix=fix)
    sampled = [part for part in parts if part.nodes]
    if sampled and (unknown := sum(bool(part.lives) and not part.nodes for part in parts)):
        say(f"no samples for {counted(unknown, 'task')}: CPU time and memory are unknown")
    nodes = [usage for part in sampled for usage in part.nodes]
    counted_use = Efficiency(
        status, "sacct" if accounted else "own samples",
        walltime_s=_walltime(lives, request),
        cpu_s=_cpu(lives, accounted, sampled),
        cpus_peak=max((float(one["cpus_peak"]) for one in nodes), default=None),
        memory_bytes=_memory(lives, accounted, nodes, requests),
        memory_mean_bytes=max((float(one["memory_mean_bytes"]) for one in nodes), default=None),
        gpus=_gpus(parts),
        steps=_steps([part.run for part in parts]),
        node_hours=sum(life.elapsed_s * life.nodes for life in lives) / 3600,
        gpu_hours=sum(life.elapsed_s * life.gpus for life in lives) / 3600,
        tasks=tuple(_task(part) for part in sampled if run.task_number is None and part.run.task_number is not None),
    )  # fmt: skip
    advice = tuple(advice_for(counted_use, job, request, starts=len(lives) // (len(requests) if accounted else 1)))
    return replace(counted_use, advice=advice)


def _task(part: Part) -> TaskUsage:
    number = part.run.task_number
    assert number is not None  # the caller passes only tasks of an array
    elapsed_s = max((life.elapsed_s for life in part.lives), default=0.0)
    return TaskUsage(number, elapsed_s, Share(part.cpu_s, part.given_cpu_s or None).share, part.memory_peak_bytes)


def _accounted(run: RunDirectory, job: ResolvedJob) -> list[AccountedLife]:
    """Return sacct's records of all jobs of the run; [] without accounting."""
    ids = job_ids(run) if run.task_number is None else [f"{one}_{run.task_number}" for one in job_ids(run.whole)]
    if not uses_slurm(job) or not ids or _has_moved(run, job):
        return []
    try:
        return accounted_usage(slurm_of(job), ids)
    except (NotFoundError, SchedulerRefusedError):  # toolkit's own samples are used instead
        return []


def _has_moved(run: RunDirectory, job: ResolvedJob) -> bool:
    """Return whether some starts were on another cluster; sacct of this cluster does not know those."""
    return any(slurm_of(one) != slurm_of(job) for one in jobs_of_starts(run).values())


def _of_accounting(life: AccountedLife) -> Life:
    memory = life.memory_bytes // max(1, life.nodes) if life.memory_bytes is not None else None
    return Life(life.elapsed_s, life.limit_s, life.nodes, life.cpus, life.gpus, memory)


def _walltime(lives: Sequence[Life], request: Request) -> Share:
    """Return the longest start with its own limit, because a resume may have requested another one."""
    longest = max(lives, key=lambda life: life.elapsed_s)
    return Share(longest.elapsed_s, longest.limit_s if longest.limit_s is not None else request.time_s)


def _cpu(lives: Sequence[Life], accounted: Sequence[AccountedLife], sampled: Sequence[Part]) -> Share:
    """Return the larger of two counts, because each misses processes killed before its sample."""
    given = sum(life.elapsed_s * life.cpus for life in lives) if accounted else sum(one.given_cpu_s for one in sampled)
    counts = [sum(life.cpu_s for life in accounted), sum(part.cpu_s for part in sampled)]
    return Share(max(counts) or None if accounted or sampled else None, given or None)


def _memory(
    lives: Sequence[Life],
    accounted: Sequence[AccountedLife],
    nodes: Sequence[dict[str, Any]],
    requests: Sequence[Request],
) -> Share:
    """Return the highest use of a node. sacct knows only the largest rank; all ranks are assumed to be that large."""
    used = [float(one["memory_peak_bytes"]) for one in nodes]
    if not used:
        used = [
            float(life.largest_rank_bytes * requests[life.component].ranks_per_node)
            for life in accounted
            if life.largest_rank_bytes is not None
        ]
    given = [life.memory_bytes for life in lives if life.memory_bytes is not None]
    asked = given[-1] if given else _most_memory(requests)
    return Share(max(used, default=None), asked)


def _most_memory(requests: Sequence[Request]) -> float | None:
    asked = [request.memory_mib for request in requests]
    return None if None in asked else max(mib for mib in asked if mib is not None) * 2**20


def _gpus(parts: Sequence[Part]) -> GpuUsage | None:
    """Return the GPUs of each part's last attempt; earlier ones may have run on other nodes."""
    found = [gpu for part in parts for usage in part.last for gpu in usage["gpus"] or ()]
    if not found:
        return None
    return GpuUsage(
        len(found), sum(gpu["utilisation"] == 0 for gpu in found),
        sum(gpu["utilisation"] for gpu in found) / len(found), max(gpu["utilisation_peak"] for gpu in found),
        max(gpu["memory_peak_bytes"] for gpu in found), max(gpu["memory_bytes"] for gpu in found),
    )  # fmt: skip


def _steps(parts: Sequence[RunDirectory]) -> StepsMade | None:
    counted_use = [steps_made(part) for part in parts]
    known = [one for one in counted_use if one is not None]
    if not known or len(known) < len(counted_use):
        return None
    return StepsMade(sum(one.made for one in known), sum(one.useful for one in known))
