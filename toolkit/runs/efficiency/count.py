"""Count what a run used, after Slurm's accounting where there is one, and after its own files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError, counted
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.efficiency.advice import advice_for
from toolkit.runs.efficiency.report import Efficiency, GpuUsage, Share, StepsMade, TaskUsage
from toolkit.runs.efficiency.samples import Life, Part, part_of
from toolkit.runs.efficiency.steps import steps_made
from toolkit.runs.record.job import Request, jobs_of_starts, recorded_job, request_of, slurm_of, uses_slurm
from toolkit.runs.status.state import run_status
from toolkit.slurm.accounted_usage import AccountedLife, accounted_usage
from toolkit.terminal.talk import say


def efficiency_of(run: RunDirectory) -> Efficiency:
    """What a run has used until now; of an array its tasks are taken together.

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
        fix = f"`toolkit preflight {shlex.quote(str(run.job_file))}` says what it may cost"
        raise CheckFailedError(f"run {run.run_id} is {status.state.value}: no start of it has begun", fix=fix)
    sampled = [part for part in parts if part.nodes]
    if sampled and (unknown := sum(bool(part.lives) and not part.nodes for part in parts)):
        say(f"nothing was sampled of {counted(unknown, 'task')}: its CPU time and memory are unknown")
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
    assert number is not None  # it is one of an array's
    elapsed_s = max((life.elapsed_s for life in part.lives), default=0.0)
    return TaskUsage(number, elapsed_s, Share(part.cpu_s, part.given_cpu_s or None).share, part.memory_peak_bytes)


def _accounted(run: RunDirectory, job: ResolvedJob) -> list[AccountedLife]:
    """What sacct says of all jobs of the run; [] without accounting."""
    ids = job_ids(run) if run.task_number is None else [f"{one}_{run.task_number}" for one in job_ids(run.whole)]
    if not uses_slurm(job) or not ids or _has_moved(run, job):
        return []
    try:
        return accounted_usage(slurm_of(job), ids)
    except (NotFoundError, SchedulerRefusedError):  # our own samples tell without it
        return []


def _has_moved(run: RunDirectory, job: ResolvedJob) -> bool:
    """True where some starts were on another cluster, whose sacct alone knows them."""
    return any(slurm_of(one) != slurm_of(job) for one in jobs_of_starts(run).values())


def _of_accounting(life: AccountedLife) -> Life:
    memory = life.memory_bytes // max(1, life.nodes) if life.memory_bytes is not None else None
    return Life(life.elapsed_s, life.limit_s, life.nodes, life.cpus, life.gpus, memory)


def _walltime(lives: Sequence[Life], request: Request) -> Share:
    """The longest life, and its own limit: a resume may have asked for another one."""
    longest = max(lives, key=lambda life: life.elapsed_s)
    return Share(longest.elapsed_s, longest.limit_s if longest.limit_s is not None else request.time_s)


def _cpu(lives: Sequence[Life], accounted: Sequence[AccountedLife], sampled: Sequence[Part]) -> Share:
    """The larger of two counts: each misses what was killed before it could look."""
    given = sum(life.elapsed_s * life.cpus for life in lives) if accounted else sum(one.given_cpu_s for one in sampled)
    counts = [sum(life.cpu_s for life in accounted), sum(part.cpu_s for part in sampled)]
    return Share(max(counts) or None if accounted or sampled else None, given or None)


def _memory(
    lives: Sequence[Life],
    accounted: Sequence[AccountedLife],
    nodes: Sequence[dict[str, Any]],
    requests: Sequence[Request],
) -> Share:
    """The node that had most. sacct knows the largest rank alone: all of a node's ranks may have been as large."""
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
    """The GPUs of each part's last attempt: earlier ones may have run on other nodes."""
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
