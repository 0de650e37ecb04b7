"""The site's values in a resolved job, under the names that the resolved job gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.expand import expand_paths
from toolkit.config.origins import Origin
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import DetectTable, Site, SiteIdentity


def values_of_site(site: Site, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the site's tables by the fields of a resolved job.

    Raises:
        ToolkitError: a path of the site has a variable that `environ` lacks.
    """
    return {
        "site": SiteIdentity(**{name: getattr(site, name) for name in SiteIdentity.model_fields}),
        "scheduler": site.scheduler,
        "launcher": site.launcher,
        "gpu": site.gpu,
        "site_env": site.env,
        "network": site.network,
        "paths": expand_paths(site, environ),
        "site_container": site.container,
    }


def site_of_record(job: ResolvedJob) -> Site:
    """The site of a resolved job, as far as the job contains it: only the job's own partitions."""
    limits = job.partition_limits
    partitions = {job.job.partition: limits.model_copy(update={"default": True})} if limits else {}
    detect = DetectTable(cluster_name=job.job.cluster if limits else "")  # whose partitions these are
    return Site(
        **dict(job.site), scheduler=job.scheduler, launcher=job.launcher, gpu=job.gpu, env=job.site_env,
        network=job.network, paths=job.paths, container=job.site_container, partitions=partitions, detect=detect,
    )  # fmt: skip


def origins_of_site(site: Site) -> dict[str, Origin]:
    """Return the origins of the site's values under their names in the resolved job."""
    renamed: dict[str, Origin] = {}
    for name, origin in site.origins.items():
        first = name.partition(".")[0]
        if first in ("env", "container"):  # a job has tables of these names, too
            renamed[f"site_{name}"] = origin
        elif "." not in name:
            renamed[f"site.{name}"] = origin
        elif first not in ("partitions", "detect"):
            renamed[name] = origin
    return renamed
