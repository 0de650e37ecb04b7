"""`submit`, `render`, `import`, `preflight` and `run`: from a job or a script to a run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from toolkit.cli.options import (
    SESSION,
    after_option,
    asks_for_job,
    echo_log,
    json_option,
    print_command_option,
    sweep_options,
)
from toolkit.errors import CHECK_FAILED
from toolkit.terminal.talk import is_plain, say

if TYPE_CHECKING:
    from toolkit.config.request import JobRequest
    from toolkit.config.resolved import ResolvedJob
    from toolkit.rundir.layout import RunDirectory
    from toolkit.submission.run_handle import Run

wait_option = click.option("--wait", is_flag=True, help="Follow the run until it ends; exit with its exit code.")
parsable_option = click.option("--parsable", is_flag=True, help="Print only `JOB_ID;RUN_ID`.")
save_as_option = click.option(
    "--save-as", type=click.Path(path_type=Path), metavar="FILE", help="Write the job file of a program given as JOB."
)
force_option = click.option("--force", is_flag=True, help="Submit even if preflight refuses the job.")


def announce(run: Run, *, parsable: bool) -> None:
    """Report the job of a run; on stderr if stdout is closed, because the job is already submitted."""
    from toolkit.slurm.records import named

    whole = run.directory.whole
    message = f"run {whole.run_id} is job {named(run.submitted_job, run.cluster)}, in {whole.path}"
    try:
        click.echo(f"{run.submitted_job};{whole.run_id}" if parsable else message)
    except OSError:
        say(message)
        raise


def follow(run: RunDirectory) -> None:
    from toolkit.runs.follow.follow import follow_to_end

    sys.exit(follow_to_end(run, plain=is_plain()))


@click.command()
@asks_for_job
@sweep_options
@after_option
@wait_option
@parsable_option
@force_option
@print_command_option
@save_as_option
@click.option("--dry-run", is_flag=True, help="Print the script that would be submitted, without keeping a run.")
def submit(
    request: JobRequest, wait: bool, parsable: bool, force: bool, save_as: Path | None, dry_run: bool
) -> None:  # fmt: skip
    """Submit JOB: a program, a job file, a script for sbatch, or a shipped job. Arguments after `--` are passed to it.

    \b
    toolkit submit train.py -N 2 --ntasks-per-node 4 -- --lr 0.1
    toolkit submit train_lm --site local --wait
    toolkit submit my_job.toml -N 4 --ntasks-per-node 8 -t 2:00:00 -- --my-flag
    toolkit submit my_job.toml --sweep train.lr=1e-3,3e-4 --sweep args.layers=2,4
    toolkit submit my_job.toml --after last:ok
    toolkit submit job.sh -t 2:00:00
    """
    from toolkit.submission.create import create, script_of
    from toolkit.submission.program_job import save_job_file, show_job_file

    show_job_file(request, save_as)
    run = None if dry_run else create(request, force=force)
    if run is None:
        click.echo(script_of(request), nl=False)
    else:
        announce(run, parsable=parsable)
    if save_as is not None:
        save_job_file(request, save_as)
    if wait and run is not None:
        follow(run.directory)


@click.command()
@asks_for_job
@sweep_options
@after_option
@print_command_option
def render(request: JobRequest) -> None:
    """Print the script of JOB, ready for sbatch, and create its run directory (`submit --dry-run` creates none).

    \b
    toolkit render train_lm -N 2 -t 1:00:00 > job.sbatch
    """
    from toolkit.submission.create import render as render_run

    click.echo(render_run(request).script(0).read_text(encoding="utf-8"), nl=False)


@click.command("import")
@click.argument("script", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Job file to write [stdout].")
def import_script(script: Path, output: Path | None) -> None:
    """Translate SCRIPT, a script for sbatch, into a job file. What has no translation is named on stderr.

    \b
    toolkit import job.sh -o job.toml
    """
    from toolkit.rundir.files import write_text
    from toolkit.submission.import_script import import_script as translate
    from toolkit.submission.program_job import require_new_file

    if output is not None:
        require_new_file(output, "-o")
    imported = translate(script, (output.parent if output is not None else Path()).absolute())
    for note in imported.notes:
        say(note)
    if imported.sweep:
        command = shlex.join(["toolkit", "submit", str(output or "FILE.toml"), *imported.sweep])
        say(f"the array becomes a sweep: {command}")
    if output is None:
        click.echo(imported.text, nl=False)
    else:
        if output.parent.absolute() != Path.cwd():
            say("arguments that are relative paths are relative to the folder in which you run `toolkit submit`")
        write_text(output, imported.text, mode=0o644)
        click.echo(f"wrote {output}")


@click.command()
@asks_for_job
@json_option
@sweep_options
@print_command_option
def preflight(request: JobRequest, as_json: bool) -> None:
    """Check whether JOB would run, and estimate its cost; nothing is written. `submit` makes the same checks first.

    \b
    toolkit preflight train_lm
    toolkit preflight my_job.toml -N 4 -t 2:00:00 --json
    """
    from toolkit.submission.create import preflight as look_at
    from toolkit.submission.preflight.cost import in_words

    found = look_at(request)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        for finding in found.findings:
            click.echo(f"{finding.term:<8} {finding.check:<13} {finding.as_error()}")
        for one in found.silent:
            click.echo(f"{'unknown':<8} {one}")
        click.echo("submit would refuse this job" if found.refusals else "submit would accept this job")
        if found.cost is not None:
            click.echo(in_words(found.cost))
    sys.exit(CHECK_FAILED if found.refusals else 0)


@click.command()
@asks_for_job
@click.option("--session", type=SESSION, metavar="NAME", help="Use the nodes of this session (`toolkit session ls`).")
@save_as_option
@print_command_option
def run(request: JobRequest, session: str | None, save_as: Path | None) -> None:
    """Run JOB in the foreground: with srun inside an allocation, else on this machine. Ctrl-C saves and ends it.

    An allocation determines the number of nodes and, if requested from salloc, the tasks per node.

    \b
    toolkit run train.py -n 2
    toolkit run mpi_hello -n 4
    toolkit run train_lm --session dev
    salloc -N 2 --ntasks-per-node 4 toolkit run train_lm
    """
    from toolkit.submission.program_job import save_job_file, show_job_file
    from toolkit.submission.run_here import make_here, resolve_here

    show_job_file(request, save_as)
    inside = None
    if session:
        from toolkit.session.session import enter

        inside = enter(session, os.environ)
    resolved = resolve_here(request, inside=inside)
    directory = make_here(request, resolved)
    if save_as is not None:
        save_job_file(request, save_as)
    live_here(directory, resolved, 0)


def live_here(directory: RunDirectory, job: ResolvedJob, start: int) -> NoReturn:
    """Run one start in the foreground; exit with the job's exit code."""
    from toolkit.submission.batch_search import run_start

    sys.exit(run_start(directory, job, start, echo_log, partial(click.echo, err=True)))
