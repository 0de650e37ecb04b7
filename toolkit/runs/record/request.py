"""What a job requests from Slurm: its keys, and over them the raw sbatch options of the site, the job and this submission."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.config.resolved import ResolvedJob
from toolkit.runs.record.job import sbatch_words
from toolkit.slurm.array import ArrayTasks
from toolkit.slurm.sbatch_options import excluded_nodes, last_value_of
from toolkit.slurm.tres import gpus_of, memory_mib

_PLAIN_FEATURES = re.compile(r"[\w.&|-]+", re.ASCII)


@dataclass(frozen=True)
class Request:
    """The resources of one task of an array, or of a job that is none.

    `memory_mib` is for each node, None where the cluster's default counts. `time_s` is None without a limit, and where
    `has_time` is false, too. `features` are alternatives of features that one node must have together; () for none, and
    for what is not so simple.
    """

    partitions: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    ranks_per_node: int
    cpus_per_node: int
    memory_mib: float | None
    gpus_per_node: int
    gpu_type: str
    gpu_option: str
    gres: tuple[str, ...]  # names of all that --gres requests
    time_s: int | None
    has_time: bool
    account: str
    qos: str
    reservation: str
    features: tuple[frozenset[str], ...]
    nodelist: str
    exclude: str
    whole_nodes: bool
    array: ArrayTasks | None

    @property
    def tasks(self) -> int:
        """How many jobs an array is; 1 for a job that is none."""
        return 1 if self.array is None else len(self.array)

    def tres(self, nodes: int) -> dict[str, float]:
        """What one job takes on some nodes, by Slurm's names; without memory where the cluster decides on it."""
        counts = {"node": 1.0, "cpu": float(self.cpus_per_node), "gres/gpu": float(self.gpus_per_node)}
        if self.memory_mib is not None:
            counts["mem"] = self.memory_mib
        if self.gpu_type:
            counts[f"gres/gpu:{self.gpu_type}"] = counts["gres/gpu"]
        return {name: count * nodes for name, count in counts.items() if count}


def request_of(job: ResolvedJob, once: Sequence[str] = ()) -> Request:
    """What sbatch is asked for by a job; `once` are options of this submission alone."""
    table, words = job.job, (*sbatch_words(job), *once)
    gpu_option = job.gpu.request.replace("{count}", str(table.gpus_per_node)) if table.gpus_per_node else ""
    gpus, gpu_type = _gpus((gpu_option, *words))
    cpus = table.ranks_per_node * table.cpus_per_rank
    return Request(
        partitions=tuple(filter(None, table.partition.split(","))),
        min_nodes=table.min_nodes, max_nodes=table.max_nodes,
        ranks_per_node=table.ranks_per_node, cpus_per_node=cpus,
        memory_mib=_memory_mib(job, words, cpus, gpus),
        gpus_per_node=gpus, gpu_type=gpu_type, gpu_option=gpu_option,
        gres=_gres((gpu_option, *words)),
        time_s=table.time_s, has_time=bool(table.time),
        account=table.account, qos=table.qos, reservation=last_value_of(words, "reservation"),
        features=_features(table.constraint),
        nodelist=last_value_of((f"--nodelist={table.nodelist}", *words), "nodelist", "w"),
        exclude=excluded_nodes(table.exclude, words, ()),
        whole_nodes=any(word.split("=")[0] == "--exclusive" for word in words),
        array=table.tasks,
    )  # fmt: skip


def _gpus(words: Sequence[str]) -> tuple[int, str]:
    """GPUs on each node and their type, "" where none is named."""
    plain = last_value_of(words, "gpus-per-node")
    found = gpus_of(f"gpu:{plain}") if plain else gpus_of(last_value_of(words, "gres"))
    named = [kind for kind in found if kind]
    return sum(found.values()), named[0] if len(named) == 1 else ""


def _gres(words: Sequence[str]) -> tuple[str, ...]:
    asked = (one.strip().removeprefix("gres/").partition(":")[0] for one in last_value_of(words, "gres").split(","))
    return tuple(name.partition("=")[0] for name in asked if name not in ("", "none"))


def _memory_mib(job: ResolvedJob, words: Sequence[str], cpus: int, gpus: int) -> float | None:
    """`--mem=0` requests all of each node, which any node has: it counts as 0."""
    key = f"--mem={job.job.mem_gb_per_node}G" if job.job.mem_gb_per_node else ""
    of_node = memory_mib(last_value_of((key, *words), "mem"))
    if of_node is not None:
        return of_node
    for name, count in (("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        each = memory_mib(last_value_of(words, name))
        if each is not None:
            return each * count
    return None


def _features(constraint: str) -> tuple[frozenset[str], ...]:
    """Of `a&b|c`: a and b together, or c. Counts and brackets are Slurm's to judge."""
    if not _PLAIN_FEATURES.fullmatch(constraint):
        return ()
    return tuple(frozenset(alternative.split("&")) for alternative in constraint.split("|"))
