"""What a resolved job has of its site, under the names that it gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.expand import expand_paths
from toolkit.config.origins import Origin
from toolkit.config.site import Site, SiteIdentity


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


def origins_of_site(site: Site) -> dict[str, Origin]:
    """Return the origins of the site's values under the names that the resolved job gives them."""
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
