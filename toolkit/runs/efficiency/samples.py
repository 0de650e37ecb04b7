"""What a run's own files say that it used: each start from its claim on, and what was sampled on each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import read_claim
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.task_files import read_usage
from toolkit.runs.record.job import Request
from toolkit.supervise.shape import Shape, shape_of_job
from toolkit.terminal.talk import say


@dataclass(frozen=True)
class Life:
    """One start, or one life of a Slurm job, as far as it is known."""

    elapsed_s: float
    limit_s: float | None
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int | None = None  # on each node


@dataclass(frozen=True)
class Part:
    """A run, or one task of an array: its starts, and the samples of each node of all its attempts and of the last one."""

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
    """What the files of a run or task contain. `asked` is what each submission requested, by its first start."""
    attempts = {run.attempt(number): usage_of(run.attempt(number)) for number in run.attempt_numbers()}
    nodes = [one for usage in attempts.values() for one in usage]
    last = list(attempts.values())[-1] if attempts else []
    return Part(run, list(_lives(run, asked, attempts)), nodes, last)


def usage_of(attempt: AttemptDirectory) -> list[dict[str, Any]]:
    """The samples of each node of an attempt.

    Where the first rank's guard saw not all ranks of its node (containers hide them, and others may have ended before the
    only look), those are taken to be like the ones that it saw.
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
    """Each start from its claim until its end; of one that has none, until anything of it was last written down."""
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
