"""Read the recorded job of a run, its cluster, and the resources that it requests."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.rundir.files import read_json
from toolkit.rundir.find import newest_record
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.run_files import damaged_record
from toolkit.runs.status.unknown_names import vanished
from toolkit.site.load import load_site
from toolkit.slurm.array import ArrayTasks
from toolkit.slurm.commands import Slurm, slurm_of_site
from toolkit.slurm.sbatch_options import excluded_nodes, gpus_of, last_value_of, memory_mib

__all__ = ["Request", "first_job", "recorded_job", "request_of", "sbatch_words", "site_of", "slurm_of", "uses_slurm"]


def slurm_of(job: ResolvedJob) -> Slurm:
    """Return Slurm's commands for the cluster of a job."""
    return slurm_of_site(job.scheduler, cluster=job.job.cluster)


def uses_slurm(job: ResolvedJob) -> bool:
    """Return whether the site has Slurm; otherwise the ranks start on this machine."""
    return job.scheduler.kind == "slurm"


def is_interactive(run: RunDirectory) -> bool:
    """Return whether the newest start runs in an allocation of the user, which toolkit must not end."""
    return any(read_json(path).get("interactive") for path in sorted(run.path.glob("submitted-*.json"))[-1:])


def recorded_job(run: RunDirectory) -> ResolvedJob:
    """Return the job of a run as last submitted, with every layer applied."""
    try:
        return _job_of_record(newest_record(run))
    except FileNotFoundError:
        raise vanished(run) from None


def jobs_of_starts(run: RunDirectory) -> dict[int, ResolvedJob]:
    """Return the job of each submission by its first start, in order."""
    resumed = sorted(run.whole.path.glob("resumed-*.json"), key=start_of)
    try:
        return {0: _job_of_record(run.whole.record)} | {start_of(path): _job_of_record(path) for path in resumed}
    except FileNotFoundError:
        raise vanished(run) from None


def first_job(run: RunDirectory) -> ResolvedJob:
    """Return the job of a run as first submitted, before any resume."""
    return _job_of_record(run.record)


def _job_of_record(path: Path) -> ResolvedJob:
    value: dict[str, Any] = read_json(path)
    try:
        return _validated(json.dumps(value["job"]))
    except ValidationError as error:
        raise damaged_record(path, value) from error


@lru_cache(maxsize=256)
def _validated(text: str) -> ResolvedJob:
    """Return the validated job; cached, because many runs have the same job, and validation is slow."""
    return ResolvedJob.model_validate(json.loads(text))


def site_of(recorded: ResolvedJob) -> Site:
    """Return the site of a recorded job: from the site file of its submission (`--site PATH`), else by name."""
    path = recorded.origin("site.name").detail.rpartition(":")[0]
    return load_site(path if path and Path(path).is_file() else recorded.site.name)


def sbatch_words(job: ResolvedJob) -> list[str]:
    """Return the options of the site, then those of the job; sbatch uses the last of each."""
    return [*job.scheduler.options, *job.job.sbatch]


_PLAIN_FEATURES = re.compile(r"[\w.&|-]+", re.ASCII)


@dataclass(frozen=True)
class Request:
    """The resources of a job, or of one task of an array.

    `memory_mib` is per node; None means the default of the cluster. `time_s` is None without a limit, or if `has_time`
    is false. `features` are alternative sets of node features; () for none, or for expressions that toolkit does not
    parse.
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
    gres: tuple[str, ...]  # the resource names in --gres
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
        """The number of jobs of an array; 1 for a single job."""
        return 1 if self.array is None else len(self.array)

    def tres(self, nodes: int) -> dict[str, float]:
        """Return the resources of one job on `nodes` nodes, by Slurm's names; without memory if the cluster sets it."""
        counts = {"node": 1.0, "cpu": float(self.cpus_per_node), "gres/gpu": float(self.gpus_per_node)}
        if self.memory_mib is not None:
            counts["mem"] = self.memory_mib
        if self.gpu_type:
            counts[f"gres/gpu:{self.gpu_type}"] = counts["gres/gpu"]
        return {name: count * nodes for name, count in counts.items() if count}


def request_of(job: ResolvedJob, extra_sbatch_options: Sequence[str] = ()) -> Request:
    """Return the resources that a job requests from sbatch, with the extra options of one submission."""
    table, words = job.job, (*sbatch_words(job), *extra_sbatch_options)
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
    """Return GPUs per node and their type, "" if unnamed."""
    plain = last_value_of(words, "gpus-per-node")
    found = gpus_of(f"gpu:{plain}") if plain else gpus_of(last_value_of(words, "gres"))
    named = [kind for kind in found if kind]
    return sum(found.values()), named[0] if len(named) == 1 else ""


def _gres(words: Sequence[str]) -> tuple[str, ...]:
    asked = (one.strip().removeprefix("gres/").partition(":")[0] for one in last_value_of(words, "gres").split(","))
    return tuple(name.partition("=")[0] for name in asked if name not in ("", "none"))


def _memory_mib(job: ResolvedJob, words: Sequence[str], cpus: int, gpus: int) -> float | None:
    """Return the requested MiB; `--mem=0` requests all memory of a node, which any node has, so it counts as 0."""
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
    """Parse `a&b|c`: a and b together, or c. Expressions with counts and brackets return ()."""
    if not _PLAIN_FEATURES.fullmatch(constraint):
        return ()
    return tuple(frozenset(alternative.split("&")) for alternative in constraint.split("|"))
