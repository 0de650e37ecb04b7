"""Check a request by itself: GPUs and ranks that do not divide, an unintended walltime, an array's numbers."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.runs.record.job import Request, sbatch_words
from toolkit.slurm.records import whole_number
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.slurm.times import format_slurm_time, meant_as_hours, parse_slurm_time
from toolkit.submission.preflight.cluster import Cluster
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.sweep.split import slices_of

__all__ = ["against_array_limits", "check_dependency", "check_shape", "check_sums"]

_MINUTES = re.compile(r"[0-9]+")
_MINUTES_AND_SECONDS = re.compile(r"([0-9]+):([0-9]+)")
_DAYS_AND_HOURS = re.compile(r"[0-9]+-([0-9]+)(?::.*)?")
_HOURS_OF_A_DAY = 24


def check_shape(job: ResolvedJob, request: Request) -> Iterator[Finding]:
    """Return the findings that need no cluster."""
    yield from _ranks_and_gpus(About(job, "ranks_per_gpu"), request)
    if request.has_time:
        yield from _walltime(About(job, "walltime"), job.job.time)


def against_array_limits(job: ResolvedJob, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Return findings on the task numbers of an array, against slurm.conf."""
    tasks, size = job.job.tasks, whole_number(settings.get("MaxArraySize"))
    if tasks is None or not (slices := slices_of(tasks, size)):
        return
    yield About(job, "array").note(
        "job.array",
        f"task {max(tasks)} is beyond one array, whose numbers stay below {size} (MaxArraySize)",
        f"none is needed: `toolkit submit` makes {counted(len(slices), 'array')} of one run",
    )


def _ranks_and_gpus(about: About, request: Request) -> Iterator[Finding]:
    ranks, gpus = request.ranks_per_node, request.gpus_per_node
    if not gpus or ranks == gpus:
        return
    asked = f"{counted(ranks, 'rank')} and {counted(gpus, 'GPU')} on each node"
    if ranks % gpus and gpus % ranks:
        fix = f"ranks_per_node = {gpus}, or gpus_per_node = {ranks}"
        yield about.refuse("job.ranks_per_node", f"{asked} do not divide each other", fix)
    elif ranks > gpus:
        yield about.note(
            "job.ranks_per_node",
            f"{asked}: {ranks // gpus} ranks share each, which NCCL refuses",
            f"ranks_per_node = {gpus}",
        )
    else:
        yield about.note(
            "job.gpus_per_node",
            f"{asked}: a rank of ours uses one, so {gpus - ranks} idle unless the program takes several",
            f"gpus_per_node = {ranks}",
        )


def _walltime(about: About, time: str) -> Iterator[Finding]:
    """Warn of times that Slurm reads as minutes, `1:30` and `24`, and of hours that exceed a day."""
    reads = f"Slurm reads {time} as"
    if (match := _MINUTES_AND_SECONDS.fullmatch(time)) and int(match[1]) <= 2 * _HOURS_OF_A_DAY:
        minutes, seconds = int(match[1]), int(match[2])
        said = counted(minutes, "minute") + (f" and {counted(seconds, 'second')}" if seconds else "")
        yield about.warn(
            "job.time",
            f"{reads} {said}",
            f'time = "{meant_as_hours(time)}" for hours and minutes, "0:{time}" if that is meant',
        )
    elif _MINUTES.fullmatch(time) and int(time) and int(time) % _HOURS_OF_A_DAY == 0 and int(time) <= 72:
        fix = f'time = "{meant_as_hours(time)}" for hours, "0:{time}:00" if that is meant'
        yield about.warn("job.time", f"{reads} {time} minutes", fix)
    elif (match := _DAYS_AND_HOURS.fullmatch(time)) and int(match[1]) >= _HOURS_OF_A_DAY:
        yield about.warn(
            "job.time",
            f"{reads} {format_slurm_time(parse_slurm_time(time))}: the part after the days is hours",
            "write days-hours:minutes:seconds",
        )


def check_dependency(job: ResolvedJob, extra_sbatch_options: Sequence[str]) -> Iterator[Finding]:
    """Check a dependency of a heterogeneous job, which Slurm applies to each component by the job's name."""
    words = [word for one in job.components for word in sbatch_words(one)]
    if job.component and "singleton" in last_value_of([*words, *extra_sbatch_options], "dependency", "d"):
        yield About(job, "components").refuse(
            job.origin("component").place("component"),
            "a singleton waits for every job of its name, and so each component would wait for the others",
            "wait for the run before by its number: -d afterany:JOBID, or --after RUN",
        )


def check_sums(job: ResolvedJob, requests: Sequence[Request], cluster: Cluster) -> Iterator[Finding]:
    """Check that components of one partition fit together."""
    asked: dict[str, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        chosen = cluster.chosen(request)
        if len(chosen) == 1:
            asked[chosen[0].name].append(number)
    for name, numbers in asked.items():
        nodes = [requests[number].min_nodes for number in numbers]
        has = cluster.partitions[name].total_nodes
        if len(numbers) > 1 and max(nodes) <= has < sum(nodes):
            yield About(job.components[numbers[-1]], "components").refuse(
                "job.nodes",
                f"{' + '.join(map(str, nodes))} = {counted(sum(nodes), 'node')} in partition {name}, which has {has}, and no node "
                "is in two components",
                "fewer nodes, or another partition for one of them",
            )
