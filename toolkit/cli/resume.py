"""`resume` and `rerun`: go on with a run, and repeat one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import flags_of, job_options, print_command_option, runs_option, sbatch_options_of
from toolkit.cli.param_types import CHECKPOINT, RUN, SITE
from toolkit.cli.places import find
from toolkit.cli.run_foreground import live_here, shape_of_allocation
from toolkit.cli.submit import after_option, announce, follow, force_option, parents_of, parsable_option, wait_option

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob
    from toolkit.rundir.layout import RunDirectory
    from toolkit.runs.record.parents import Parent
    from toolkit.submission.resume import NextStart
    from toolkit.submission.submit_run import Submitted


@click.command()
@click.argument("run", type=RUN)
@click.option(
    "--site", type=SITE, metavar="NAME", help="Another site, by its name or file [the one of the run's last start]."
)
@runs_option
@job_options
@click.option(
    "--from",
    "checkpoint",
    type=CHECKPOINT,
    metavar="CKPT",
    help="Step, folder name or path [the newest that verifies].",
)
@click.option("--here", is_flag=True, help="Go on here and now, as `run` does, instead of submitting.")
@click.option("--same-code", is_flag=True, help="With the code of the start before, whatever was edited since.")
@click.option("--job-gone", is_flag=True, help="Its old job ended with its cluster, which cannot be asked any more.")
@after_option
@wait_option
@parsable_option
@force_option
@print_command_option
def resume(
    run: str, site: str | None, runs: Path | None, settings: tuple[str, ...], checkpoint: str | None, here: bool,
    same_code: bool, job_gone: bool, after: tuple[str, ...], wait: bool, parsable: bool, force: bool, **values: Any,
) -> None:  # fmt: skip
    """Continue RUN from its newest checkpoint as a new job, maybe on another number of ranks.

    \b
    toolkit resume last
    toolkit resume last -n 2 --set train.steps=300 --wait
    toolkit resume last --here
    toolkit resume last --site local
    """
    part = find(run, runs)
    if here and after:
        raise click.UsageError("--after is for the queue, and --here begins at once")
    parents = partial(parents_of, after, runs)
    prepared = _prepare(
        part, site, settings, checkpoint, values, parents, here=here, same_code=same_code, job_gone=job_gone
    )
    if here:
        live_here(part.whole, prepared.job, prepared.number)
    announce(_hand_over(prepared, values, force=force), parsable=parsable)
    if wait:
        follow(part)


def _prepare(
    part: RunDirectory, site: str | None, settings: tuple[str, ...], checkpoint: str | None, values: dict[str, Any],
    parents: Callable[[ResolvedJob], list[Parent]], *, here: bool, same_code: bool,
    job_gone: bool,
) -> NextStart:  # fmt: skip
    """The next start of a run, which can begin: `here` needs an allocation where there is Slurm."""
    from toolkit.config.amend import nodes_after
    from toolkit.errors import ToolkitError
    from toolkit.runs.record.job import recorded_job
    from toolkit.site.detect import choose_site
    from toolkit.submission.allocation import check_here
    from toolkit.submission.resume import Changes, prepare_resume, undo_resume

    recorded = recorded_job(part)
    chosen = choose_site(site).site if site else None
    scheduler = chosen.scheduler if chosen else recorded.scheduler
    if here and scheduler.kind == "slurm":
        values = {**values, **shape_of_allocation(values, settings)}
    flags = flags_of(values, lambda: nodes_after(recorded, settings))
    options = sbatch_options_of(values, for_sbatch=scheduler.kind == "slurm" and not here)
    after = parents(recorded.model_copy(update={"scheduler": scheduler}))
    changes = Changes(settings, flags, options, checkpoint, chosen, same_code, after, job_gone)
    prepared = prepare_resume(part, changes)
    try:
        if here:
            check_here(prepared.job, os.environ, resumed=part.run_id)
    except ToolkitError:
        undo_resume(prepared)
        raise
    return prepared


def _hand_over(prepared: NextStart, values: dict[str, Any], *, force: bool) -> Submitted:
    """Submit the next start of a run; where it is refused, the run is as it was."""
    from toolkit.cli.preflight import FORCED, look_first, tell_cost
    from toolkit.errors import OwnFailureError, ToolkitError
    from toolkit.runs.record.job import uses_slurm
    from toolkit.slurm.commands import NoAnswerError
    from toolkit.submission.resume import undo_resume
    from toolkit.submission.submit_run import submit as hand_over

    options = sbatch_options_of(values, for_sbatch=uses_slurm(prepared.job))
    part = prepared.part
    try:
        cost = look_first(
            prepared.job,
            part.whole.path.parents[1],
            extra_sbatch_options=options,
            run=part,
            instead=FORCED if force else "",
        )
        tell_cost(cost)
        return hand_over(prepared.part.whole, prepared.job, prepared.number)
    except (NoAnswerError, OwnFailureError):
        raise  # the job may be in the queue
    except ToolkitError:
        undo_resume(prepared)
        raise


@click.command()
@click.argument("run", type=RUN)
@click.option(
    "--site", type=SITE, metavar="NAME", help="Another site, or what a site's file says now [the values that RUN had]."
)
@runs_option
@job_options
@wait_option
@parsable_option
@force_option
@print_command_option
def rerun(
    run: str, site: str | None, runs: Path | None, settings: tuple[str, ...], wait: bool, parsable: bool, force: bool,
    **values: Any,
) -> None:  # fmt: skip
    """Repeat RUN as a new run: its configuration, its code and its data.

    \b
    toolkit rerun last
    toolkit rerun last --set train.seed=1 --wait
    """
    from toolkit.cli.preflight import FORCED, look_first, tell_cost
    from toolkit.config.amend import nodes_after
    from toolkit.runs.record.job import first_job, uses_slurm
    from toolkit.site.detect import choose_site
    from toolkit.submission.rerun import job_to_repeat, sweep_to_repeat
    from toolkit.submission.submit_run import create, submit_new

    before = find(run, runs)
    chosen = choose_site(site).site if site else None
    flags = flags_of(values, lambda: nodes_after(first_job(before), settings))
    job = job_to_repeat(before, settings=settings, flags=flags, site=chosen)
    options = sbatch_options_of(values, for_sbatch=uses_slurm(job))
    folder = before.whole.path.parents[1]
    sweep = sweep_to_repeat(before, job, chosen)
    cost = look_first(job, folder, site=chosen, extra_sbatch_options=options, instead=FORCED if force else "")
    repeated = create(job, folder, extra_sbatch_options=options, repeats=before, sweep=sweep)
    tell_cost(cost)
    announce(submit_new(repeated, job), parsable=parsable)
    if wait:
        follow(repeated)
