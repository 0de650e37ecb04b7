"""`~` and $VARIABLES in a site's paths, expanded at submission."""

from __future__ import annotations

import re
from collections.abc import Mapping

from toolkit.config.origins import Origin
from toolkit.config.site import PathsTable, Site
from toolkit.errors import ToolkitError
from toolkit.rundir.find import typed_path

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def expand_paths(site: Site, environ: Mapping[str, str]) -> PathsTable:
    """Return the site's paths, with the variables that must be known at submission expanded.

    `local_scratch` is not expanded: its variables are the node's.

    Raises:
        ToolkitError: a variable is not set.
    """
    expanded = {key: expand_path(site, key, environ) for key in ("runs", "scratch")}
    return site.paths.model_copy(update=expanded)


def expand_path(site: Site, key: str, environ: Mapping[str, str]) -> str:
    """Return one path of `[paths]`, expanded.

    Raises:
        ToolkitError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            raise ToolkitError(
                f"${name} is not set",
                where=site.origins.get(f"paths.{key}", Origin("built-in")).place(f"paths.{key}"),
                fix=f"export {name}, or write the path without it",
            )
        return environ[name]

    text: str = getattr(site.paths, key)
    return str(typed_path(_VARIABLE.sub(value, text))) if text else ""
