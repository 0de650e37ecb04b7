"""Create and submit a run, in this order: site, partition, sweep, preflight, run directory, script, sbatch."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.document import Flag, no_line
from toolkit.config.found_micro_batch import with_found_micro_batch
from toolkit.config.job_file_text import job_file_text
from toolkit.config.program_document import is_not_job_file
from toolkit.config.request import JobRequest, resolve
from toolkit.config.resolved import ResolvedJob, shown_arguments
from toolkit.config.script_document import WITHOUT_EFFECT
from toolkit.config.site import Site
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.claims import open_submission, process_start_ticks
from toolkit.rundir.files import (
    cannot_write,
    mode_of_files_in,
    private_mode,
    read_json,
    runs_folder,
    utc_now,
    write_bytes,
    write_json,
    write_text,
)
from toolkit.rundir.known_folders import record_folder
from toolkit.rundir.layout import RunDirectory, create_run, discard_run
from toolkit.rundir.sweep import write_sweep
from toolkit.runs.named_runs import is_only_folder
from toolkit.runs.record.job import sbatch_words, slurm_of, uses_slurm
from toolkit.runs.record.parents import Parent, dependency_options, record_of
from toolkit.runs.status.reconcile_submission import array_of_first_start, close_submission
from toolkit.site.load import check_exported_conf, choose_site
from toolkit.site.partitions import resolve_on
from toolkit.slurm.batch_script import read_batch_script
from toolkit.slurm.submit import SETTLE_S, UnsettledError, token_of
from toolkit.submission.preflight.arguments import check_set_arguments
from toolkit.submission.preflight.beginning import check_beginning
from toolkit.submission.preflight.checks import FORCED, RENDERED, Preflight, look, report_cost, require_good
from toolkit.submission.preflight.known_program import offer_preset
from toolkit.submission.preflight.script_lines import check_script
from toolkit.submission.preflight.secrets import check_secrets, warn_of_likely_secrets
from toolkit.submission.preflight.unpassed import warn_of_args, warn_of_slurm, warn_of_unpassed
from toolkit.submission.run_handle import Run
from toolkit.submission.script import keep_code, nodes_to_exclude, render_script, repeat_code
from toolkit.submission.sweep.sweep import ResolvedSweep
from toolkit.terminal.talk import say
from toolkit.version import VERSION

if TYPE_CHECKING:
    from toolkit.submission.sweep.rows import Row

__all__ = [
    "HandoverInterruptedError", "Submitted", "check_sbatch_options", "create", "make_record", "make_run",
    "parents_of", "preflight", "render", "script_of", "submit", "submit_new",
]  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """A job that is resolved on its site, before anything is written."""

    job: ResolvedJob
    site: Site
    runs: Path
    sbatch_options: Sequence[str]
    sweep: ResolvedSweep | None = None
    parents: Sequence[Parent] = ()
    swept: Mapping[str, str] = field(default_factory=dict)  # the place of each swept key


def create(request: JobRequest, *, force: bool = False) -> Run:
    """Submit a new run to Slurm, or start it in the background on this machine if the site has no scheduler.

    `force` submits the job even if preflight refuses it.

    Raises:
        ToolkitError: the request is invalid or refused, or the run directory cannot be written; no run remains.
        UnsettledError: Slurm did not confirm that it has the job; the run remains.
    """
    planned = _plan(request)
    run = _make(planned, request, instead=FORCED if force else "")
    submitted = submit_new(run, planned.job)
    return Run(run.path, submitted.job_id, submitted.cluster)


def render(request: JobRequest) -> RunDirectory:
    """Create a run with its script without submitting it; refusals by preflight are only reported."""
    run = _make(_plan(request), request, instead=RENDERED)
    record_folder(run.path.parents[1])
    return run


def script_of(request: JobRequest) -> str:
    """Return the script that `create` would submit, without leaving a run directory."""
    run = _make(_plan(request), request, instead=RENDERED)
    script = run.script(0).read_text(encoding="utf-8")
    discard_run(run)
    return script


def preflight(request: JobRequest) -> Preflight:
    """Return the preflight findings on a job; nothing is written.

    Raises:
        ToolkitError: the request is invalid, or its ranks could not start.
    """
    planned = _plan(request)
    check_beginning(planned.job, planned.sbatch_options)
    check_secrets(planned.job, os.environ)
    return _look(planned, with_sbatch=True)


def _look(planned: _Planned, *, with_sbatch: bool = False) -> Preflight:
    return look(
        planned.job, planned.runs, site=planned.site, extra_sbatch_options=planned.sbatch_options,
        with_sbatch=with_sbatch, swept=planned.swept,
    )  # fmt: skip


def _plan(request: JobRequest) -> _Planned:
    """Choose the site and the partition, and resolve the job, its sweep and the runs that it follows."""
    request = _with_ranks_of_script(request)
    is_swept = bool(request.sweeps) or request.grid is not None
    rows = _rows_of(request) if is_swept else ()
    if is_swept:
        request = _with_array(request, rows)
    site = choose_site(request.site).site
    job = resolve_on(request, site, say, limits=False)
    options = check_sbatch_options(request.sbatch_options, for_sbatch=uses_slurm(job))
    sweep = _swept(job, site, rows) if is_swept else None
    runs = runs_folder(request.runs, os.environ, job.paths.runs)
    swept = {key: flag.name for row in reversed(rows) for key, flag in row.items()}
    return _Planned(job, site, runs, options, sweep, parents_of(request, job, runs), swept)


def _with_ranks_of_script(request: JobRequest) -> JobRequest:
    """Return the request with -n as an option of sbatch if the job is a script, whose nodes Slurm may then choose."""
    if request.ranks is None or not resolve(replace(request, ranks=None), None).job.once:
        return request
    return replace(request, ranks=None, sbatch_options=(f"--ntasks={request.ranks}", *request.sbatch_options))


def _rows_of(request: JobRequest) -> Sequence[Row]:
    from toolkit.submission.sweep.sweep import read_sweep_options

    return read_sweep_options(request.sweeps, request.grid)


def _with_array(request: JobRequest, rows: Sequence[Row]) -> JobRequest:
    from toolkit.submission.sweep.sweep import array_of

    return request.with_flags({"job.array": Flag(array_of(rows, request.typed("job.array")), "-a")})


def _swept(job: ResolvedJob, site: Site, rows: Sequence[Row]) -> ResolvedSweep:
    from toolkit.submission.sweep.sweep import resolve_sweep, warn_of_unread

    sweep = resolve_sweep(job, site, rows)
    warn_of_unread(job, rows)
    return sweep


def parents_of(request: JobRequest, job: ResolvedJob, runs: Path) -> Sequence[Parent]:
    """Return the runs that a job follows."""
    if not request.after:
        return ()
    from toolkit.submission.chain import find_parents

    return find_parents(request.after, job, runs, is_only=is_only_folder(request.runs))


def _make(planned: _Planned, request: JobRequest, *, instead: str) -> RunDirectory:
    """Create the run directory with its script after preflight has passed; then report the cost."""
    cost = require_good(_look(planned), instead=instead)
    run = make_run(
        planned.job, planned.runs, extra_sbatch_options=planned.sbatch_options, sweep=planned.sweep,
        after=planned.parents, calls=request.calls,
    )  # fmt: skip
    report_cost(cost)
    return run


_ENVIRONMENT = ("CONDA_DEFAULT_ENV", "HOSTNAME", "LANG", "LOADEDMODULES", "TRACEPARENT", "USER", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Submitted:
    """A run whose start number `start` was submitted as `job_id`; `cluster` is "" for the site's own."""

    run: RunDirectory
    start: int
    job_id: str
    cluster: str = ""


class HandoverInterruptedError(KeyboardInterrupt):
    """Ctrl-C during a submission: the job may exist, so its run directory must remain."""


def check_sbatch_options(options: Sequence[str], *, for_sbatch: bool) -> Sequence[str]:
    """Return sbatch options that come after those of the job in the script, and so override them.

    Raises:
        ToolkitError: an option cannot be a line of the script, or the run does not use sbatch.
    """
    for option in options:
        if reason := no_line(option):
            raise ToolkitError(reason, where=option, fix="remove it")
        if not for_sbatch:
            raise ToolkitError(
                "is an sbatch option, but this run does not use sbatch",
                where=option,
                fix="omit it, or `toolkit submit` to a cluster",
            )
    return options


def make_run(
    job: ResolvedJob, runs: Path, *, here: bool = False, extra_sbatch_options: Sequence[str] = (), sweep: ResolvedSweep | None = None,
    after: Sequence[Parent] = (), repeats: RunDirectory | None = None, calls: Mapping[str, Any] | None = None,
) -> RunDirectory:  # fmt: skip
    """Create the directory of a new run, with its code, its script and its record.

    If `here`, the nodes are already allocated. `extra_sbatch_options` are sbatch options for this submission only.
    `sweep` has the values of each task. `after` are the runs that this one follows. `repeats` is the run whose code a
    rerun uses. `calls` has the function and the arguments of an executor's tasks.

    Raises:
        ToolkitError, OSError: the ranks could not start, read or save as requested, the script cannot be rendered, or
            the folder cannot be written; no run remains.
    """
    check_beginning(job, extra_sbatch_options)
    check_secrets(job, os.environ)
    warn_of_likely_secrets(job)
    warn_of_unpassed(job, os.environ)
    warn_of_args(job)
    warn_of_slurm(job)
    offer_preset(job)
    for finding in (*check_script(job), *check_set_arguments(job)) if here else ():  # else `look` has reported them
        say(f"warning: {finding.as_error()}")
    run = create_run(runs, job.job.name, access=job.paths.access)
    try:
        job, code = keep_code(job, run, runs) if repeats is None else repeat_code(job, run, repeats)
        excluded = [] if here else nodes_to_exclude(job, runs)
        task_overrides = sweep.task_overrides if sweep is not None else None
        options, whole_array = [*extra_sbatch_options], _whole_array(job, repeats)
        if after:
            options += dependency_options(after, [*sbatch_words(job), *extra_sbatch_options])
        script = render_script(
            job, run, 0, excluded=excluded, extra_sbatch_options=options, task_overrides=task_overrides, whole_array=whole_array
        )  # fmt: skip
        write_text(run.script(0), script, mode=0o700)
        _copy_job_files(job, run, repeats)
        if sweep is not None:
            write_sweep(run, sweep.sweep)
        if calls is None and repeats is not None and repeats.calls.exists():
            calls = read_json(repeats.calls)
        if calls is not None:
            write_json(run.calls, calls, mode=0o600)
        record = make_record(job, command=sys.argv, code=code, rerun_of=repeats.run_id if repeats else "")
        record |= {"whole_array": whole_array} if whole_array else {}
        if after:
            record |= record_of(after)
        write_json(run.record, record)  # written last, because a folder with a record counts as a run
    except BaseException:  # also after Ctrl-C, because nothing was submitted
        discard_run(run)
        raise
    return run


def _whole_array(job: ResolvedJob, repeats: RunDirectory | None) -> str:
    """Return the array of which a rerun repeats a single task; "" for any other run."""
    if repeats is None or job.job.array != str(repeats.task_number):
        return ""
    return array_of_first_start(repeats.whole)


def _copy_job_files(job: ResolvedJob, run: RunDirectory, repeats: RunDirectory | None) -> None:
    """Copy the job file and the batch script, from the run that a rerun repeats."""
    entry = job.job_directory / str(job.job.entry)
    if job.job.once:
        write_bytes(run.batch_script, (entry if repeats is None else repeats.batch_script).read_bytes(), mode=0o700)
        for one in (one for part in read_batch_script(entry).components for one in part if one.name in WITHOUT_EFFECT):
            say(f"{one.where}: {one.option} has no effect in a run of toolkit")
    mode = mode_of_files_in(run.path) & 0o640
    if repeats is None and is_not_job_file(job.job_file, once=job.job.once):
        write_text(run.job_file, job_file_text(job), mode=mode)
    elif not (job.job.once and job.job_file == entry):
        source = job.job_file if repeats is None else repeats.job_file
        write_bytes(run.job_file, source.read_bytes(), mode=mode & private_mode(source))


def make_record(job: ResolvedJob, *, command: list[str], code: dict[str, Any], rerun_of: str = "") -> dict[str, Any]:
    """Return the record of a new run; only listed environment variables are in it, so it contains no secret."""
    return {
        "schema": 1,
        "created": utc_now(),
        "command": shown_arguments(command),
        "working_directory": str(Path.cwd()),
        "toolkit": VERSION,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "host": platform.node(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "code": code,
        "job": job.model_dump(mode="json", by_alias=True),
        **({"rerun_of": rerun_of} if rerun_of else {}),
    }


def submit(run: RunDirectory, job: ResolvedJob, start: int) -> Submitted:
    """Submit the script of a run to Slurm, or start it in the background without Slurm.

    Raises:
        SchedulerRefusedError: sbatch refused it.
        ToolkitError: the run directory cannot be written; nothing was submitted.
        UnsettledError: toolkit cannot determine whether Slurm accepted the job; `status` and `resume` query again.
    """
    if job.train.is_auto:
        with_found_micro_batch(job, run.micro_batch)
    try:
        return _submit(run, job, start)
    finally:  # also if toolkit cannot determine whether the job exists
        record_folder(run.path.parents[1])


def _submit(run: RunDirectory, job: ResolvedJob, start: int) -> Submitted:
    from toolkit.submission.submitit_executors import LocalScriptExecutor  # submitit is slow to import

    script = run.script(start)
    if not uses_slurm(job):
        executor = LocalScriptExecutor(run, script)
        with _handing_over(f"the start was interrupted; `toolkit status {run.run_id}` shows whether it was submitted"):
            job_id = executor.submit_script().job_id
            close_submission(run, start, job_id)
        return Submitted(run, start, job_id)
    if shutil.which("srun") is None:
        raise NotFoundError("srun and sbatch are not on PATH", fix="load the Slurm module, or use --site local")
    if not job.scheduler.conf:
        check_exported_conf(os.environ)
    _warn_of_variables()
    with _handing_over(f"sbatch was interrupted; `toolkit status {run.run_id}` finds its job"):
        job_id = _submit_to_slurm(run, job, start)
    return Submitted(run, start, job_id, job.job.cluster)


@contextmanager
def _handing_over(words: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        say(words)
        raise HandoverInterruptedError from interrupt


def _submit_to_slurm(run: RunDirectory, job: ResolvedJob, start: int) -> str:
    from toolkit.submission.submitit_executors import submit_to_slurm  # submitit is slow to import

    token = token_of(run.run_id, start)
    try:
        opened = open_submission(run, start, token, process_started=process_start_ticks(os.getpid()))
    except OSError as error:
        raise cannot_write(error) from error
    try:
        job_id, parts = submit_to_slurm(run, job, start, slurm_of(job))
    except UnsettledError as error:
        raise UnsettledError(
            error.message,
            where=str(run.path),
            fix=f"the run directory is kept: run `toolkit status {run.run_id}` twice, {SETTLE_S:.0f} s apart; if it reports "
            f"that Slurm has no such job, `toolkit resume {run.run_id}` submits the job again",
        ) from error
    except ToolkitError:
        opened.unlink(missing_ok=True)
        raise
    close_submission(run, start, job_id, parts)
    return job_id


def submit_new(run: RunDirectory, job: ResolvedJob) -> Submitted:
    """Submit a run that was just created; if it is refused, nothing of it remains.

    Raises:
        as `submit`.
    """
    try:
        return submit(run, job, 0)
    except UnsettledError:
        raise  # the job may be in the queue, and would need its run directory
    except ToolkitError:
        discard_run(run)
        raise
    except HandoverInterruptedError:
        raise
    except KeyboardInterrupt:  # nothing was submitted yet
        discard_run(run)
        raise


def _warn_of_variables() -> None:
    """Warn about SBATCH_ variables without a job key: toolkit removes them, because they would override the script."""
    from toolkit.slurm.sbatch_table import KEYS_OF_VARIABLES, SWITCH_VARIABLES

    known = {*KEYS_OF_VARIABLES, *SWITCH_VARIABLES}
    for name in sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in known):
        option = "--" + name.removeprefix("SBATCH_").lower().replace("_", "-")
        say(f"{name} is ignored; add {option}={os.environ[name]} to the key job.sbatch")
