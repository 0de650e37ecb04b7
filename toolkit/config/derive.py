"""Derived values, for keys that no layer set: the partition, ranks, CPUs, GPUs, `zero` and `stages_per_rank`."""

from __future__ import annotations

from typing import Any

from toolkit.config.component import ComponentTable, ResolvedComponent
from toolkit.config.origins import Origin
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import PartitionTable, Site


def derive(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """Return the job with its partitions chosen and the unset keys derived, also those of each component.

    Nothing is derived from a partition that the site does not have; `check_request` rejects it.
    """
    return derive_parallel(_derive_components(resolved, _derive_job(resolved, site), site))


def _derive_components(stated: ResolvedJob, resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """The job with each component's values derived from its own, and from those that [job] sets."""
    origins = {key: origin for key, origin in resolved.origins.items() if not key.startswith("component[")}
    components = []
    for number, table in enumerate(stated.component):
        own = {f"job.{name}": stated.origin(f"component[{number}].{name}") for name in table.stated}
        one = _derive_job(
            stated.model_copy(
                update={"job": stated.job.model_copy(update=table.stated), "origins": {**stated.origins, **own}}
            ),
            site,
        )
        components.append(ResolvedComponent(job=one.job, partition_limits=one.partition_limits))
        for name in ComponentTable.model_fields:
            if f"job.{name}" in one.origins:
                origins[f"component[{number}].{name}"] = one.origins[f"job.{name}"]
    return resolved.model_copy(update={"resolved_components": components, "origins": origins})


def _derive_job(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    job: dict[str, Any] = {}
    origins = dict(resolved.origins)

    def fill(name: str, value: Any, origin: Origin) -> None:
        if f"job.{name}" not in origins:
            job[name] = value
            origins[f"job.{name}"] = origin

    if resolved.job.repeat > 1:
        fill("requeue", False, Origin("derived", "job.repeat"))
    if site.scheduler.kind == "local" and resolved.origin("job.cluster").layer == "SBATCH_*":
        # Sites that set SLURM_CLUSTERS in every shell mean it for Slurm's own commands.
        job["cluster"] = ""
        del origins["job.cluster"]
    if site.scheduler.cluster:
        fill("cluster", site.scheduler.cluster, site.origins.get("scheduler.cluster", Origin("site")))
    away = is_elsewhere(job.get("cluster", resolved.job.cluster), site)
    name = resolved.job.partition or ("" if away else site.default_partition)
    limits = None if away else site.partitions.get(name)
    if limits is not None:
        where = {key: site.origins.get(f"partitions.{name}.{key}") for key in PartitionTable.model_fields}
        source = Origin("site", f"partition {name}")
        fill("partition", name, where["default"] or source)
        for key in ("qos", "constraint"):
            if getattr(limits, key):
                fill(key, getattr(limits, key), where[key] or source)
        if limits.gpus_per_node:
            # A rank uses one GPU, so a job that sets fewer ranks needs fewer GPUs.
            stated = resolved.job.ranks_per_node if "job.ranks_per_node" in origins else limits.gpus_per_node
            fill("gpus_per_node", min(stated, limits.gpus_per_node), where["gpus_per_node"] or source)
    gpus = job.get("gpus_per_node", resolved.job.gpus_per_node)
    fill("ranks_per_node", gpus or 1, Origin("derived", "job.gpus_per_node"))
    ranks = job.get("ranks_per_node", resolved.job.ranks_per_node)
    if limits is not None and limits.gpus_per_node and gpus:
        share = limits.cpus_per_node * gpus // (limits.gpus_per_node * ranks)
        fill("cpus_per_rank", max(1, share), Origin("derived", f"the CPUs of partition {name}"))

    return resolved.model_copy(
        update={"job": resolved.job.model_copy(update=job), "partition_limits": limits, "origins": origins}
    )


def is_elsewhere(cluster: str, site: Site) -> bool:
    """True if the job's cluster differs from the one whose partitions the site file lists."""
    return cluster not in ("", site.scheduler.cluster or site.detect.cluster_name)


def derive_parallel(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the unset keys of [parallel] derived."""
    parallel, origins = resolved.parallel, dict(resolved.origins)
    if "parallel.zero" not in origins:
        parallel = parallel.model_copy(update={"zero": 3 if parallel.shard > 1 else 0})
        origins["parallel.zero"] = Origin("derived", "parallel.shard")
    if "parallel.stages_per_rank" not in origins and parallel.pp > 1 and parallel.schedule == "interleaved":
        parallel = parallel.model_copy(update={"stages_per_rank": 2})
        origins["parallel.stages_per_rank"] = Origin("derived", "parallel.schedule")
    return resolved.model_copy(update={"parallel": parallel, "origins": origins})
