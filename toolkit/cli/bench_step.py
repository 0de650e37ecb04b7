"""`toolkit bench step`: where the time of a job's training step goes, and what to change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import JOB, RUN, SITE, echo_log, job_options, request_of, runs_option
from toolkit.errors import ToolkitError
from toolkit.runs.named_runs import find

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest
    from toolkit.metrics.step_profile import StepProfile

USUAL_JOB = "train_lm"


@click.command()
@click.argument("job", type=JOB, default=USUAL_JOB)
@click.option("--steps", default=20, help="Steps that are profiled [20].")
@click.option("--warmup", default=5, help="Steps before them [5].")
@click.option(
    "--result",
    type=RUN,
    metavar="RUN",
    help="Measure nothing: print what a run, or a file of metrics/profile.json, has.",
)
@click.option("--json", "as_json", is_flag=True, help="One object; docs/bench.md has the keys.")
@click.option("--site", type=SITE, metavar="NAME", help="Site's name or file [TOOLKIT_SITE, detected].")
@runs_option
@job_options
def step(
    job: str, steps: int, warmup: int, result: str | None, as_json: bool, site: str | None, runs: Path | None,
    settings: tuple[str, ...], **values: Any,
) -> None:  # fmt: skip
    """Profile some training steps of JOB [train_lm], here and now as `toolkit run` does, and say what to change.

    \b
    toolkit bench step
    toolkit bench step my_job.toml -n 4 --set train.micro_batch=8 --json
    salloc -N 2 --ntasks-per-node 4 toolkit bench step
    """
    if result is not None:
        _print(_stored(result, runs), as_json=as_json)
        return
    found, code = _measured(request_of(job, values, site=site, runs=runs, settings=settings), steps, warmup)
    _print(found, as_json=as_json)
    sys.exit(code)


def _stored(result: str, runs: Path | None) -> StepProfile:
    """What a run, or a file, has."""
    from toolkit.metrics.step_profile import FILE, read_profile
    from toolkit.rundir.files import typed_path

    path = typed_path(result)
    return read_profile(path if path.is_file() else find(result, runs).metrics / FILE)


def _measured(request: JobRequest, steps: int, warmup: int) -> tuple[StepProfile, int]:
    """Run the job for `warmup` and `steps` steps; return (the profile, the exit code)."""
    from toolkit.metrics.step_profile import FILE, read_profile
    from toolkit.submission.run_here import follow_here, make_here, resolve_here

    for name, value, least in (("--steps", steps, 1), ("--warmup", warmup, 0)):
        if value < least:
            raise ToolkitError(f"{value} steps", where=name, fix=f"give {least} or more")
    # The run saves when its last step has ended, so that one is not among the profiled ones.
    length = (f"train.steps={warmup + steps + 1}", f"train.profile_from={warmup + 1}", f"train.profile_steps={steps}")
    later = " ".join(f"--set {setting}" for setting in length[1:])
    resolved = resolve_here(
        replace(request, settings=(*request.settings, *length, "restart.crashes=0")),
        fix_for_several=f"`toolkit submit {request.job} {later}`, then `toolkit bench step --result last`",
    )
    directory = make_here(request, resolved)
    code = follow_here(directory, resolved, 0, partial(echo_log, err=True), partial(click.echo, err=True))
    path = directory.metrics / FILE
    if code and not path.exists():
        sys.exit(code)  # the run has told why
    return read_profile(path), code


def _print(found: StepProfile, *, as_json: bool) -> None:
    from toolkit.metrics.step_advice import advise
    from toolkit.metrics.step_table import lines_of

    if as_json:
        advice = [asdict(one) for one in advise(found)]
        click.echo(json.dumps(asdict(found) | {"advice": advice}, allow_nan=False))
        return
    for line in lines_of(found):
        click.echo(line)
