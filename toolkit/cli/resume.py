"""`resume` and `rerun`: continue a run, and repeat one."""

import sys
from pathlib import Path
from typing import Any

import click

from toolkit.cli.options import (
    CHECKPOINT,
    RUN,
    SITE,
    after_option,
    job_options,
    print_command_option,
    refuse_before_dashes,
    request_of,
    runs_option,
)
from toolkit.cli.submit import announce, follow, force_option, live_here, parsable_option, wait_option


@click.command()
@click.argument("run", type=RUN)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.option("--site", type=SITE, metavar="NAME", help="Name or file of another site [the site of the last start].")
@runs_option
@job_options
@click.option(
    "--from",
    "checkpoint",
    type=CHECKPOINT,
    metavar="CKPT",
    help="Step, folder name or path [the newest valid checkpoint].",
)
@click.option("--here", is_flag=True, help="Continue in the foreground, as `run` does, instead of submitting.")
@click.option("--same-code", is_flag=True, help="Use the code of the previous start, without later edits.")
@click.option("--job-gone", is_flag=True, help="Treat the old job as ended: its cluster is gone and does not respond.")
@after_option
@wait_option
@parsable_option
@force_option
@print_command_option
def resume(
    run: str, argv: tuple[str, ...], site: str | None, runs: Path | None, settings: tuple[str, ...],
    checkpoint: str | None, here: bool, same_code: bool, job_gone: bool, after: tuple[str, ...], wait: bool,
    parsable: bool, force: bool, **values: Any,
) -> None:  # fmt: skip
    """Continue RUN from its newest checkpoint as a new job, optionally with another number of ranks.

    Arguments after `--` replace those after the `--` of the previous start; a `--` alone removes them.

    \b
    toolkit resume last
    toolkit resume last -n 2 --set train.steps=300 --wait
    toolkit resume last --here
    toolkit resume last -- --init_from=resume
    toolkit resume last --site local
    """
    from toolkit.submission.next_start import prepare_next, submit_next

    has_arguments = "--" in sys.argv
    refuse_before_dashes(argv, may_lack_dashes=False)
    if here and after:
        raise click.UsageError("--after cannot be combined with --here, which starts immediately")
    request = request_of(
        run, values, settings=settings, site=site, runs=runs, after=after, argv=argv if has_arguments else None
    )
    prepared = prepare_next(request, checkpoint=checkpoint, same_code=same_code, job_gone=job_gone, here=here)
    if here:
        live_here(prepared.part.whole, prepared.job, prepared.number)
    resumed = submit_next(prepared, request, force=force)
    announce(resumed, parsable=parsable)
    if wait:
        follow(resumed.directory)


@click.command()
@click.argument("run", type=RUN)
@click.option(
    "--site", type=SITE, metavar="NAME", help="Use another site, or the current values of a site file [RUN's values]."
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
    """Repeat RUN as a new run with the same configuration, code and data.

    \b
    toolkit rerun last
    toolkit rerun last --set train.seed=1 --wait
    """
    from toolkit.submission.next_start import rerun as repeat

    repeated = repeat(request_of(run, values, settings=settings, site=site, runs=runs), force=force)
    announce(repeated, parsable=parsable)
    if wait:
        follow(repeated.directory)
