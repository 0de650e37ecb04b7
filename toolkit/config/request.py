"""A request for a job as the user stated it, and the job that it resolves to on a site."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.config.document import Flag
from toolkit.config.layers import resolve_job
from toolkit.config.rank_count import flags_of_ranks, needs_nodes
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import find_job
from toolkit.config.site import Site

__all__ = ["JobRequest", "resolve", "with_rank_flags"]


@dataclass(frozen=True)
class JobRequest:
    """What a user requests, before any file or cluster is read.

    `job` is a job file, the name of a shipped job or, for `resume` and `rerun`, of a run. `flags` set keys such as
    "job.nodes", and `settings` are `table.key=value` strings, as --set takes them. `ranks` is the total number of ranks
    (-n). `sbatch_options` are options of sbatch for this submission alone, `argv` what follows `--`, `site` the name or file
    of a site, and `runs` the folder of all runs. `sweeps`, `grid` and `after` are the options of those names. `calls` are the
    function and the arguments of an executor's tasks.
    """

    job: str
    settings: tuple[str, ...] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    ranks: int | None = None
    argv: tuple[str, ...] = ()
    site: str | None = None
    runs: Path | None = None
    sweeps: tuple[str, ...] = ()
    grid: Path | None = None
    after: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    calls: Mapping[str, Any] | None = None

    def typed(self, key: str) -> Any:
        """Return the value of the flag that sets a key; None without such a flag."""
        flag = self.flags.get(key)
        return None if flag is None else flag.value

    def with_flags(self, flags: Mapping[str, Flag]) -> JobRequest:
        """Return the request with more flags, which override those of the same keys."""
        return replace(self, flags={**self.flags, **flags})


def resolve(
    request: JobRequest, site: Site | None, *, environ: Mapping[str, str] = os.environ, limits: bool = True
) -> ResolvedJob:
    """Return the requested job on a site; None resolves what does not depend on a site.

    `limits` False leaves the limits of the partition to a later check against the cluster itself.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the request.
        NotFoundError: there is no such job file.
    """
    request = with_rank_flags(request, environ)
    return resolve_job(
        find_job(request.job), site=site, environ=environ, settings=request.settings, flags=request.flags,
        argv=request.argv, limits=limits,
    )  # fmt: skip


def with_rank_flags(request: JobRequest, environ: Mapping[str, str] = os.environ) -> JobRequest:
    """Return the request with the number of ranks (-n) as flags for the nodes, or for the ranks of each node.

    Raises:
        ToolkitError: the ranks do not fill the nodes evenly.
    """
    if request.ranks is None:
        return request
    nodes, each = request.typed("job.nodes"), request.typed("job.ranks_per_node")
    if needs_nodes(request.ranks, nodes, each):
        nodes = resolve(replace(request, ranks=None), None, environ=environ).nodes
    return replace(request.with_flags(flags_of_ranks(request.ranks, nodes, each)), ranks=None)
