"""The components of a heterogeneous job against each other: Slurm begins all of them at the same time, on nodes of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.runs.record.job import Request, sbatch_words
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.submission.preflight.cluster import Cluster
from toolkit.submission.preflight.finding import About, Finding

__all__ = ["check_dependency", "check_sums"]


def check_dependency(job: ResolvedJob, extra_sbatch_options: Sequence[str]) -> Iterator[Finding]:
    """Slurm hands the dependency on to each component, and they all have the job's name."""
    words = [word for one in job.components for word in sbatch_words(one)]
    if job.component and "singleton" in last_value_of([*words, *extra_sbatch_options], "dependency", "d"):
        yield About(job, "components").refuse(
            job.origin("component").place("component"),
            "a singleton waits for every job of its name, and so each component would wait for the others",
            "wait for the run before by its number: -d afterany:JOBID, or --after RUN",
        )


def check_sums(job: ResolvedJob, requests: Sequence[Request], cluster: Cluster) -> Iterator[Finding]:
    """Components of one partition need its nodes together."""
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
