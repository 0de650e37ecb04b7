"""Values that follow from others where no layer set them: the partition, ranks, CPUs, GPUs, `zero` and `stages_per_rank`."""

from __future__ import annotations

from typing import Any

from toolkit.config.origins import Origin
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import PartitionTable, Site
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError


def derive(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """Return the job with the site's partition chosen and the open keys filled in.

    Raises:
        ToolkitError: the job names a partition that the site does not have.
    """
    job: dict[str, Any] = {}
    origins = dict(resolved.origins)

    def fill(name: str, value: Any, origin: Origin) -> None:
        if f"job.{name}" not in origins:
            job[name] = value
            origins[f"job.{name}"] = origin

    name = resolved.job.partition or site.default_partition
    limits = _limits(resolved, site, name) if name else None
    if limits is not None:
        where = {key: site.origins.get(f"partitions.{name}.{key}") for key in PartitionTable.model_fields}
        source = Origin("site", f"partition {name}")
        fill("partition", name, where["default"] or source)
        for key in ("qos", "constraint"):
            if getattr(limits, key):
                fill(key, getattr(limits, key), where[key] or source)
        if limits.gpus_per_node:
            # A rank uses one GPU, so a job that states fewer ranks needs fewer GPUs.
            stated = resolved.job.ranks_per_node if "job.ranks_per_node" in origins else limits.gpus_per_node
            fill("gpus_per_node", min(stated, limits.gpus_per_node), where["gpus_per_node"] or source)
    gpus = job.get("gpus_per_node", resolved.job.gpus_per_node)
    fill("ranks_per_node", gpus or 1, Origin("derived", "job.gpus_per_node"))
    ranks = job.get("ranks_per_node", resolved.job.ranks_per_node)
    if limits is not None and limits.gpus_per_node and gpus:
        share = limits.cpus_per_node * gpus // (limits.gpus_per_node * ranks)
        fill("cpus_per_rank", max(1, share), Origin("derived", f"the CPUs of partition {name}"))

    parallel = resolved.parallel
    if "parallel.zero" not in origins:
        parallel = parallel.model_copy(update={"zero": 3 if parallel.shard > 1 else 0})
        origins["parallel.zero"] = Origin("derived", "parallel.shard")
    if "parallel.stages_per_rank" not in origins and parallel.pp > 1 and parallel.schedule == "interleaved":
        parallel = parallel.model_copy(update={"stages_per_rank": 2})
        origins["parallel.stages_per_rank"] = Origin("derived", "parallel.schedule")
    return resolved.model_copy(
        update={
            "job": resolved.job.model_copy(update=job),
            "parallel": parallel,
            "partition_limits": limits,
            "origins": origins,
        }
    )


def _limits(resolved: ResolvedJob, site: Site, name: str) -> PartitionTable | None:
    if name in site.partitions or not site.partitions:
        return site.partitions.get(name)
    if site.scheduler.kind == "local":
        return None
    close = nearest(name, site.partitions) or list(site.partitions)
    raise ToolkitError(
        f"site {site.name} has no partition {name!r}",
        where=resolved.origin("job.partition").place("job.partition"),
        fix=f"write {' or '.join(repr(one) for one in close)}",
    )
