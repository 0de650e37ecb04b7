"""Check a request by itself: the ratio of ranks to GPUs, a walltime that may be a mistake, array task numbers."""

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
    """Return findings without a query to the cluster."""
    yield from _ranks_and_gpus(About(job, "ranks_per_gpu"), request)
    if request.has_time and not job.job.once:  # a batch script has the form that sbatch reads
        yield from _walltime(About(job, "walltime"), job.job.time)


def against_array_limits(job: ResolvedJob, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Return findings on the task numbers of an array, against slurm.conf."""
    tasks, size = job.job.tasks, whole_number(settings.get("MaxArraySize"))
    if tasks is None or not (slices := slices_of(tasks, size)):
        return
    yield About(job, "array").note(
        "job.array",
        f"the task numbers of a Slurm array must be below {size} (MaxArraySize), but the last task is {max(tasks)}",
        f"no action needed: `toolkit submit` splits the run into {counted(len(slices), 'array')}",
    )


def _ranks_and_gpus(about: About, request: Request) -> Iterator[Finding]:
    ranks, gpus = request.ranks_per_node, request.gpus_per_node
    if not gpus or ranks == gpus:
        return
    asked = f"{counted(ranks, 'rank')} and {counted(gpus, 'GPU')} per node"
    if ranks % gpus and gpus % ranks:
        fix = f"ranks_per_node = {gpus}, or gpus_per_node = {ranks}"
        yield about.refuse("job.ranks_per_node", f"{asked}: neither number is divisible by the other", fix)
    elif ranks > gpus:
        yield about.note(
            "job.ranks_per_node",
            f"{asked}: {ranks // gpus} ranks share each GPU, which NCCL rejects",
            f"ranks_per_node = {gpus}",
        )
    else:
        yield about.note(
            "job.gpus_per_node",
            f"{asked}: toolkit uses one per rank, so {counted(gpus - ranks, 'GPU')} would be idle unless the program uses several",
            f"gpus_per_node = {ranks}",
        )


def _walltime(about: About, time: str) -> Iterator[Finding]:
    """Warn about times that Slurm reads as minutes, such as `1:30` and `24`, and about 24 or more hours in `D-HH`."""
    reads = f"Slurm reads {time} as"
    if (match := _MINUTES_AND_SECONDS.fullmatch(time)) and int(match[1]) <= 2 * _HOURS_OF_A_DAY:
        minutes, seconds = int(match[1]), int(match[2])
        said = counted(minutes, "minute") + (f" and {counted(seconds, 'second')}" if seconds else "")
        yield about.warn(
            "job.time",
            f"{reads} {said}",
            f'time = "{meant_as_hours(time)}" for hours and minutes, "0:{time}" if minutes are intended',
        )
    elif _MINUTES.fullmatch(time) and int(time) and int(time) % _HOURS_OF_A_DAY == 0 and int(time) <= 72:
        fix = f'time = "{meant_as_hours(time)}" for hours, "0:{time}:00" if minutes are intended'
        yield about.warn("job.time", f"{reads} {time} minutes", fix)
    elif (match := _DAYS_AND_HOURS.fullmatch(time)) and int(match[1]) >= _HOURS_OF_A_DAY:
        yield about.warn(
            "job.time",
            f"{reads} {format_slurm_time(parse_slurm_time(time))}: the part after the days is hours",
            "write days-hours:minutes:seconds",
        )


def check_dependency(job: ResolvedJob, extra_sbatch_options: Sequence[str]) -> Iterator[Finding]:
    """Refuse a singleton dependency of a heterogeneous job, whose components all have the name of the job."""
    words = [word for one in job.components for word in sbatch_words(one)]
    if job.component and "singleton" in last_value_of([*words, *extra_sbatch_options], "dependency", "d"):
        yield About(job, "components").refuse(
            job.origin("component").place("component"),
            "--dependency=singleton waits for all jobs of the same name, so each component would wait for the others",
            "depend on the previous run instead: -d afterany:JOBID, or --after RUN",
        )


def check_sums(job: ResolvedJob, requests: Sequence[Request], cluster: Cluster) -> Iterator[Finding]:
    """Check that a partition has enough nodes for all of its components together."""
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
                f"{' + '.join(map(str, nodes))} = {counted(sum(nodes), 'node')} in partition {name}, which has {has}: "
                "components cannot share nodes",
                "request fewer nodes, or another partition for one of them",
            )
