"""Count what a run used, after Slurm's accounting where there is one, and after its own files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.batch.efficiency.advice import advice_for
from toolkit.batch.efficiency.steps import steps_made
from toolkit.batch.efficiency.told import Efficiency, GpuUsage, Share, StepsMade
from toolkit.batch.request import Request, request_of
from toolkit.batch.state import run_status
from toolkit.batch.submission import recorded_job, slurm_of, submitted_jobs, uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, NotFoundError, SchedulerRefusedError, ToolkitError, counted
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json, read_json_or_none
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.slurm.accounted_usage import AccountedLife, accounted_usage
from toolkit.supervise.shape import Shape, shape_of_job


@dataclass(frozen=True)
class Life:
    """One start, or one life of a Slurm job, as far as it is known."""

    elapsed_s: float
    limit_s: float | None
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int | None = None  # on each node


def efficiency_of(run: RunDirectory, *, echo: bool = False) -> Efficiency:
    """What a run has used until now; of an array its tasks are taken together.

    Raises:
        CheckFailedError: it has not begun, or nobody has counted.
    """
    job, status = recorded_job(run), run_status(run, echo=echo)
    requests = [request_of(one) for one in job.components]
    request = requests[0]
    parts = [run.task(number) for number in run.task_numbers()] or [run]
    accounted = _accounted(run, job, echo=echo)
    own = [list(_own_lives(part, requests)) for part in parts]
    lives = [_of_accounting(life) for life in accounted] or [life for of_part in own for life in of_part]
    tidied = sum(not of_part and bool(part.attempt_numbers()) for part, of_part in zip(parts, own, strict=True))
    if not accounted and tidied and lives:
        sys.stderr.write(f"toolkit: left out, since they are done and keep no samples: {counted(tidied, 'task')}\n")
    elif not lives and tidied:
        what = f"run {run.run_id} is {status.state.value}: tasks that are done keep no samples, and sacct tells nothing of them"
        raise CheckFailedError(what, fix="without accounting, submit one such job that is no array: it keeps them")
    if not lives:
        fix = f"`toolkit preflight {shlex.quote(str(run.job_file))}` says what it may cost"
        raise CheckFailedError(f"run {run.run_id} is {status.state.value}: no start of it has begun", fix=fix)
    nodes = [usage for part in parts for attempt in _attempts(part) for usage in usage_of(attempt)]
    told = Efficiency(
        status, "sacct" if accounted else "own samples",
        walltime_s=Share(max((life.elapsed_s for life in lives), default=None), _limit_s(lives, request)),
        cpu_s=_cpu(lives, accounted, nodes),
        memory_bytes=_memory(lives, accounted, nodes, requests),
        gpus=_gpus(parts),
        steps=_steps(parts),
        node_hours=sum(life.elapsed_s * life.nodes for life in lives) / 3600,
        gpu_hours=sum(life.elapsed_s * life.gpus for life in lives) / 3600,
    )  # fmt: skip
    advice = tuple(advice_for(told, job, request, starts=len(lives) // (len(requests) if accounted else 1)))
    return replace(told, advice=advice)


def usage_of(attempt: AttemptDirectory) -> list[dict[str, Any]]:
    """The samples of each node of an attempt.

    Where the first rank's guard saw not all ranks of its node (containers hide them, and others may have ended before the
    only look), those are taken to be like the ones that it saw.
    """
    begun = read_json_or_none(attempt.start_file)
    if begun is None:
        return []
    job = read_json_or_none(RunDirectory(attempt.path.parents[1]).start(begun["start"]) / "job.json")
    shape = Shape.of(1, max(1, begun["ranks"] // begun["nodes"])) if job is None else shape_of_job(job)
    found = [one for one in map(_usage_or_none, sorted(attempt.usage.glob("rank-*.json"))) if one is not None]
    return [_of_all_ranks(usage, shape.component_of(usage["first_rank"]).ranks_per_node) for usage in found]


def _usage_or_none(path: Path) -> dict[str, Any] | None:
    """None where a lost node left half of it: it is not waited for until it is on the disk."""
    try:
        usage: dict[str, Any] = read_json(path)
    except ToolkitError as error:
        sys.stderr.write(f"toolkit: left out: {error.where}: {error.message}\n")
        return None
    return usage


def _of_all_ranks(usage: dict[str, Any], on_node: int) -> dict[str, Any]:
    times = on_node / max(1, min(usage["ranks"], on_node))
    return {**usage, **{name: usage[name] * times for name in ("cpu_s", "memory_peak_bytes")}}


def _attempts(run: RunDirectory) -> list[AttemptDirectory]:
    return [run.attempt(number) for number in run.attempt_numbers()]


def _accounted(run: RunDirectory, job: ResolvedJob, *, echo: bool) -> list[AccountedLife]:
    """What sacct says of all jobs of the run; [] without accounting."""
    ids = job_ids(run) if run.task_number is None else [f"{one}_{run.task_number}" for one in job_ids(run.whole)]
    if not uses_slurm(job) or not ids or _has_moved(run, job):
        return []
    try:
        return accounted_usage(slurm_of(job, echo=echo), ids)
    except (NotFoundError, SchedulerRefusedError):  # our own samples tell without it
        return []


def _has_moved(run: RunDirectory, job: ResolvedJob) -> bool:
    """True where some starts were on another cluster, whose sacct alone knows them."""
    return any(slurm_of(one) != slurm_of(job) for one in submitted_jobs(run))


def _of_accounting(life: AccountedLife) -> Life:
    memory = life.memory_bytes // max(1, life.nodes) if life.memory_bytes is not None else None
    return Life(life.elapsed_s, life.limit_s, life.nodes, life.cpus, life.gpus, memory)


def _own_lives(run: RunDirectory, requests: Sequence[Request]) -> Iterator[Life]:
    """Each start from its claim until its end; of one that has none, until anything of it was last written down."""
    last_of_start: dict[int, dict[str, Any]] = {}
    seen: dict[int, list[str]] = {}
    for attempt in _attempts(run):
        begun, ended = read_json_or_none(attempt.start_file), read_json_or_none(attempt.exit_file)
        if begun is not None:
            times = [begun["time"], *([ended["time"]] if ended else []), *(one["time"] for one in usage_of(attempt))]
            seen.setdefault(begun["start"], []).extend(times)
            last_of_start[begun["start"]] = begun
    for number in run.start_numbers():
        claim, end, begun = (
            read_claim(run, number),
            read_json_or_none(run.start(number) / "end.json"),
            last_of_start.get(number),
        )
        if claim is None or begun is None:
            continue
        over = end["time"] if end is not None else max(seen[number])
        elapsed_s = max(0.0, (datetime.fromisoformat(over) - datetime.fromisoformat(claim.claimed)).total_seconds())
        nodes = [begun["nodes"]] if len(requests) == 1 else [request.min_nodes for request in requests]
        cpus = sum(count * request.cpus_per_node for count, request in zip(nodes, requests, strict=True))
        gpus = sum(count * request.gpus_per_node for count, request in zip(nodes, requests, strict=True))
        yield Life(elapsed_s, requests[0].time_s, sum(nodes), cpus, gpus)


def _limit_s(lives: Sequence[Life], request: Request) -> float | None:
    limits = [life.limit_s for life in lives if life.limit_s is not None]
    return limits[-1] if limits else request.time_s


def _cpu(lives: Sequence[Life], accounted: Sequence[AccountedLife], nodes: Sequence[dict[str, Any]]) -> Share:
    """The larger of two counts: each misses what was killed before it could look."""
    given = sum(life.elapsed_s * life.cpus for life in lives)
    counts = [sum(life.cpu_s for life in accounted), sum(float(one["cpu_s"]) for one in nodes)]
    return Share(max(counts) or None if accounted or nodes else None, given or None)


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


def _gpus(parts: Sequence[RunDirectory]) -> GpuUsage | None:
    """The GPUs of each part's last attempt: earlier ones may have run on other nodes."""
    last = (part.last_attempt() for part in parts)
    found = [gpu for attempt in last if attempt for usage in usage_of(attempt) for gpu in usage["gpus"] or ()]
    if not found:
        return None
    return GpuUsage(
        len(found), sum(gpu["utilisation"] == 0 for gpu in found),
        sum(gpu["utilisation"] for gpu in found) / len(found),
        max(gpu["memory_peak_bytes"] for gpu in found), max(gpu["memory_bytes"] for gpu in found),
    )  # fmt: skip


def _steps(parts: Sequence[RunDirectory]) -> StepsMade | None:
    told = [steps_made(part) for part in parts]
    known = [one for one in told if one is not None]
    if not known or len(known) < len(told):
        return None
    return StepsMade(sum(one.made for one in known), sum(one.useful for one in known))
