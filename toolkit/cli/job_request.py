"""A job as a command line asks for it: JOB, what follows `--`, --site, --runs, --set and a shape in sbatch's letters."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from toolkit.cli.options import SHAPE, Command, flags_of, job_options, runs_option, sbatch_options_of
from toolkit.cli.param_types import JOB, SITE

if TYPE_CHECKING:
    from toolkit.config.origins import Flag
    from toolkit.config.resolved import ResolvedJob
    from toolkit.config.site import Site
    from toolkit.site.partitions import Resolve


@dataclass(frozen=True)
class AskedJob:
    """What was typed. `shape` has the options of `job_options` by their names, None for those that were not given."""

    job: str
    argv: tuple[str, ...] = ()
    site: str | None = None
    runs: Path | None = None
    settings: tuple[str, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)

    def shaped(self, shape: Mapping[str, Any]) -> AskedJob:
        """The same job with some options of its shape set over those that were typed."""
        return replace(self, shape={**self.shape, **shape})

    def resolver(self, *, limits: bool = True) -> Resolve:
        """What resolves the job on a site or on none.

        Without `limits` those of the partition are left to who looks at the cluster; one that is being chosen must serve.
        """
        from toolkit.config.layers import resolve_job
        from toolkit.config.shipped import find_job

        path = find_job(self.job)

        def nodes_before() -> int | str:
            others = flags_of({**self.shape, "ntasks": None}, nodes_before)
            return resolve_job(path, site=None, environ=os.environ, settings=self.settings, flags=others).nodes

        flags = flags_of(self.shape, nodes_before)

        def resolve(site: Site | None, more: Mapping[str, Flag]) -> ResolvedJob:
            return resolve_job(
                path, site=site, environ=os.environ, settings=self.settings, flags={**flags, **more}, argv=self.argv,
                limits=limits or "job.partition" in more,
            )  # fmt: skip

        return resolve

    def sbatch_options(self, *, for_sbatch: bool) -> list[str]:
        """-o, -e and -d as sbatch takes them.

        Raises:
            ToolkitError: one cannot stand in a line of the script, or no sbatch will read it.
        """
        return sbatch_options_of(self.shape, for_sbatch=for_sbatch)

    def runs_folder(self, resolved: ResolvedJob) -> Path:
        """RUNS for the job: --runs > TOOLKIT_RUNS > its site's > ./runs."""
        from toolkit.rundir.find import runs_folder

        return runs_folder(self.runs, os.environ, resolved.paths.runs)


def asks_for_job(function: Command) -> Command:
    """Add what every command that makes a run takes; the command gets it as its first argument, an `AskedJob`."""

    @functools.wraps(function)
    def command(
        *,
        job: str,
        argv: tuple[str, ...],
        site: str | None,
        runs: Path | None,
        settings: tuple[str, ...],
        **others: Any,
    ) -> Any:
        shape = {name: others.pop(name) for name in SHAPE}
        return function(AskedJob(job, argv, site, runs, settings, shape), **others)

    with_options = runs_option(job_options(cast(Command, command)))
    of_site = click.option("--site", type=SITE, metavar="NAME", help="Site's name or file [TOOLKIT_SITE, detected].")
    of_argv = click.argument("argv", nargs=-1, type=click.UNPROCESSED)
    return click.argument("job", type=JOB)(of_argv(of_site(with_options)))
