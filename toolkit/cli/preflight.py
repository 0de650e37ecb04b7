"""What commands say of a job before they hand it over: refusals with their fixes, warnings, and what it may cost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.errors import CHECK_FAILED, ToolkitError, all_of
from toolkit.talk import say

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.config.site import Site
    from toolkit.rundir.layout import RunDirectory
    from toolkit.submission.cost import Cost
    from toolkit.submission.preflight.finding import Finding

# What a refusal is called where it does not end the command.
FORCED = "passed over (--force)"
RENDERED = "submit would refuse"


def look_first(
    job: ResolvedJob,
    runs: Path | None,
    *,
    site: Site | None = None,
    extra_sbatch_options: Sequence[str] = (),
    run: RunDirectory | None = None,
    instead: str = "",
) -> Cost | None:
    """Look at a job before anything is made for it, and say on stderr what is to be said.

    Args:
        runs: the folder of run directories; None for a session.
        instead: what refusals are called where they are told alone; "" has them end the command.

    Returns:
        What the job may cost, for `tell_cost` once nothing else has refused it.

    Raises:
        ToolkitError: what was found can never run; each refusal is a line.
    """
    from toolkit.submission.preflight.checks import look

    found = look(job, runs, site=site, extra_sbatch_options=extra_sbatch_options, run=run)
    for one in found.silent:
        say(f"not looked at, {one}")
    for finding in found.warnings:
        say(f"warning: {finding.as_error()}")
    if found.is_final and instead != RENDERED:
        raise _all_of(found.refusals)
    if found.refusals and not instead:
        does = "asks for it" if runs is None else "submits it"
        raise _all_of(found.refusals, way_past=f"; --force {does} all the same")
    for finding in found.refusals:
        say(f"{instead}: {finding.as_error()}")
    return found.cost


def tell_cost(cost: Cost | None) -> None:
    """Say on stderr what a job that is handed over may cost."""
    from toolkit.submission.cost import in_words

    if cost is not None:
        say(in_words(cost))


def print_preflight(
    job: ResolvedJob, runs: Path, *, site: Site, extra_sbatch_options: Sequence[str], as_json: bool
) -> None:
    """The answer of `preflight`; the command ends with 1 where something is refused."""
    from toolkit.submission.cost import in_words
    from toolkit.submission.entry_checks import check_beginning
    from toolkit.submission.preflight.checks import look
    from toolkit.submission.secrets import check_secrets

    check_beginning(job, extra_sbatch_options)
    check_secrets(job, os.environ)
    found = look(job, runs, site=site, extra_sbatch_options=extra_sbatch_options)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        for finding in found.findings:
            click.echo(f"{finding.severity.value:<8} {finding.check:<13} {finding.as_error()}")
        for one in found.silent:
            click.echo(f"{'unknown':<8} {one}")
        click.echo("it would be refused" if found.refusals else "nothing is in its way")
        if found.cost is not None:
            click.echo(in_words(found.cost))
    sys.exit(CHECK_FAILED if found.refusals else 0)


def _all_of(found: Sequence[Finding], *, way_past: str = "") -> ToolkitError:
    """All of them, a line each; the last one says how to go past them, where that is possible."""
    *before, last = [one.as_error() for one in found]
    last = ToolkitError(last.message, where=last.where, fix=f"{last.fix}{way_past}")
    return all_of([*before, last])
