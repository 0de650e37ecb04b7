"""`toolkit bench`: measure this machine, or some steps of a job: their time, their memory, their largest micro-batch."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.bench_collectives import collectives
from toolkit.cli.options import JOB, RUN, SITE, echo_log, job_options, request_of, runs_option
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError, counted
from toolkit.runs.named_runs import find

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest
    from toolkit.config.resolved import ResolvedJob
    from toolkit.metrics.step_profile import StepProfile
    from toolkit.rundir.layout import RunDirectory

USUAL_JOB = "train_lm"


@click.group()
def bench() -> None:
    """Measure collectives and training steps.

    \b
    toolkit bench collectives --ranks 4
    """


bench.add_command(collectives)


def _run(request: JobRequest, job: ResolvedJob) -> tuple[RunDirectory, int]:
    """Run a job in the foreground, with all output on stderr; return (its directory, its exit code)."""
    from toolkit.submission.batch_search import run_start
    from toolkit.submission.run_here import make_here

    directory = make_here(request, job)
    return directory, run_start(directory, job, 0, partial(echo_log, err=True), partial(click.echo, err=True))


@bench.command()
@click.argument("job", type=JOB, default=USUAL_JOB)
@click.option("--steps", default=20, help="Number of profiled steps [20].")
@click.option("--warmup", default=5, help="Number of steps before the profiled ones [5].")
@click.option("--result", type=RUN, metavar="RUN", help="Print the stored profile of a run or profile.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/bench.md lists the keys.")
@click.option("--site", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
@runs_option
@job_options
def step(
    job: str, steps: int, warmup: int, result: str | None, as_json: bool, site: str | None, runs: Path | None,
    settings: tuple[str, ...], **values: Any,
) -> None:  # fmt: skip
    """Profile some training steps of JOB [train_lm], in the foreground as `run` does, and advise what to change.

    \b
    toolkit bench step
    toolkit bench step my_job.toml -n 4 --set train.micro_batch=8 --json
    salloc -N 2 --ntasks-per-node 4 toolkit bench step
    """
    if result is not None:
        _print_profile(_stored_profile(result, runs), as_json=as_json)
        return
    found, code = _measured(request_of(job, values, site=site, runs=runs, settings=settings), steps, warmup)
    _print_profile(found, as_json=as_json)
    sys.exit(code)


def _stored_profile(result: str, runs: Path | None) -> StepProfile:
    """Return the profile in a run or file."""
    from toolkit.metrics.step_profile import FILE, read_profile
    from toolkit.rundir.files import typed_path

    path = typed_path(result)
    return read_profile(path if path.is_file() else find(result, runs).metrics / FILE)


def _measured(request: JobRequest, steps: int, warmup: int) -> tuple[StepProfile, int]:
    """Run the job for `warmup` and `steps` steps; return (the profile, the exit code)."""
    from toolkit.metrics.step_profile import FILE, read_profile
    from toolkit.submission.run_here import resolve_here

    for name, value, least in (("--steps", steps, 1), ("--warmup", warmup, 0)):
        if value < least:
            raise ToolkitError(f"expected at least {least}, got {value}", where=name, fix=f"choose {least} or more")
    # Run one more step: the run saves after its last step, and the profile must not include a save.
    length = (f"train.steps={warmup + steps + 1}", f"train.profile_from={warmup + 1}", f"train.profile_steps={steps}")
    later = " ".join(f"--set {setting}" for setting in length[1:])
    resolved = resolve_here(
        replace(request, settings=(*request.settings, *length, "restart.crashes=0")),
        fix_for_several=f"`toolkit submit {request.job} {later}`, then `toolkit bench step --result last`",
    )
    directory, code = _run(request, resolved)
    path = directory.metrics / FILE
    if code and not path.exists():
        sys.exit(code)  # the run has reported why
    return read_profile(path), code


def _print_profile(found: StepProfile, *, as_json: bool) -> None:
    from toolkit.metrics.step_advice import advise
    from toolkit.metrics.step_table import lines_of

    if as_json:
        advice = [asdict(one) for one in advise(found)]
        click.echo(json.dumps(asdict(found) | {"advice": advice}, allow_nan=False))
        return
    for line in lines_of(found):
        click.echo(line)


@bench.command()
@click.argument("job", type=JOB, default=USUAL_JOB)
@click.option("--result", type=RUN, metavar="RUN", help="Print the stored report of a run or memory.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/bench.md lists the keys.")
@click.option("--site", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
@runs_option
@job_options
def memory(
    job: str,
    result: str | None,
    as_json: bool,
    site: str | None,
    runs: Path | None,
    settings: tuple[str, ...],
    **values: Any,
) -> None:
    """Run three steps of JOB [train_lm], and print the memory of each rank by part, predicted and measured.

    \b
    toolkit bench memory my_job.toml -n 2 --set parallel.shard=2
    salloc -N 2 --ntasks-per-node 4 toolkit bench memory my_job.toml --json
    """
    from toolkit.metrics.memory_table import MEMORY_FILE, lines_of_memory
    from toolkit.rundir.files import read_json, typed_path
    from toolkit.submission.batch_search import settings_of_trial
    from toolkit.submission.run_here import resolve_here

    if result is not None:
        path = typed_path(result) if typed_path(result).is_file() else find(result, runs).metrics / MEMORY_FILE
    else:
        request = request_of(job, values, site=site, runs=runs, settings=settings)
        chosen = settings_of_trial(3, {"train.measure_memory": "true", "train.log_every": 1, "env.malloc": "trimmed"})
        request = replace(request, settings=(*request.settings, *chosen))
        directory, code = _run(request, resolve_here(request))
        if code:
            sys.exit(code)  # the run has reported why
        shutil.rmtree(directory.path / "checkpoints", ignore_errors=True)  # as large as the state of the job
        path = directory.metrics / MEMORY_FILE
    if not path.exists():
        fix = "measure a job that uses `Trainer`, as train_lm does, with `toolkit bench memory JOB`"
        raise NotFoundError("no memory report found", where=str(path), fix=fix)
    found = read_json(path)
    for line in [json.dumps(found)] if as_json else lines_of_memory(found):
        click.echo(line)


@bench.command()
@click.argument("job", type=JOB, default=USUAL_JOB)
@click.option("--headroom", default=10, metavar="PERCENT", help="Share of the largest size to leave free [10].")
@click.option("--most", type=int, metavar="N", help="Largest size to try [the samples of a rank per step].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/bench.md lists the keys.")
@click.option("--site", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
@runs_option
@job_options
def batch(
    job: str, headroom: int, most: int | None, as_json: bool, site: str | None, runs: Path | None, settings: tuple[str, ...],
    **values: Any,
) -> None:  # fmt: skip
    """Find the largest micro-batch of JOB [train_lm] that fits into memory, by short runs on all ranks.

    \b
    toolkit bench batch my_job.toml -n 4
    salloc -N 2 --ntasks-per-node 4 toolkit bench batch my_job.toml --set train.batch=1024
    """
    from toolkit.rundir.files import runs_folder
    from toolkit.rundir.known_folders import record_folder
    from toolkit.submission.batch_search import NOTHING_FITS, search_batch
    from toolkit.submission.run_here import resolve_here

    if not 0 <= headroom < 100:
        raise ToolkitError(f"expected 0 to 99 percent, got {headroom}", where="--headroom", fix="choose 10")
    if most is not None and most < 1:
        raise ToolkitError(f"expected at least 1, got {most}", where="--most", fix="choose 1 or more")
    job_here = resolve_here(request_of(job, values, site=site, runs=runs, settings=settings))
    folder = runs_folder(runs, os.environ, job_here.paths.runs)
    record_folder(folder)
    report = partial(click.echo, err=as_json)
    found = search_batch(job_here, folder, headroom=headroom / 100, most=most, report=lambda one: report(str(one)))
    if as_json:
        click.echo(json.dumps(found.as_json(), allow_nan=False))
    elif found.micro_batch:
        limit = ", and no larger one was tried" if found.is_limited else f", less {headroom} % for fragmentation"
        click.echo(
            f"the largest size is {found.largest}{limit}: set train.micro_batch = {found.micro_batch}, which makes "
            f"{found.accumulation:,} per step of {counted(found.batch, 'sample')} "
            f"on {counted(found.data_ranks, 'data rank')}"
        )
    if not found.micro_batch:
        raise CheckFailedError("not even one sample per rank fits into memory", fix=NOTHING_FITS)
