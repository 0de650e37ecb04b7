"""From a resolved job to a run, and from a run to a job in the queue or in the background."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.batch.bad_nodes import nodes_left_out
from toolkit.batch.beginning import check_codec, check_source
from toolkit.batch.record import make_record
from toolkit.batch.script import render_script, sbatch_words
from toolkit.batch.settle import close_submission
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import cannot_write, read_json, write_json, write_text
from toolkit.rundir.find import newest_record, typed_path
from toolkit.rundir.layout import RunDirectory, create_run, discard_run
from toolkit.rundir.submissions import open_submission
from toolkit.site.detect import check_exported_conf
from toolkit.slurm.commands import Slurm
from toolkit.slurm.submit import SETTLE_S, UnsettledError, comment_of, token_of
from toolkit.supervise.allocation import process_start_ticks


@dataclass(frozen=True)
class Submitted:
    """A run whose start `start` was handed over as `job_id`."""

    run: RunDirectory
    start: int
    job_id: str


def slurm_of(job: ResolvedJob, *, echo: bool = False) -> Slurm:
    """Slurm's commands for the site of a job."""
    conf = job.scheduler.conf
    return Slurm(configuration=str(typed_path(conf)) if conf else "", echo=echo)


def uses_slurm(job: ResolvedJob) -> bool:
    """False for the site where ranks start on this machine."""
    return job.scheduler.kind == "slurm"


def is_interactive(run: RunDirectory) -> bool:
    """True where the newest start lives in somebody's allocation, which no request of ours may end."""
    return any(read_json(path).get("interactive") for path in sorted(run.path.glob("submitted-*.json"))[-1:])


def create(job: ResolvedJob, runs: Path, *, here: bool = False, once: Sequence[str] = ()) -> RunDirectory:
    """Make the run directory of a new run, with its script and its record.

    `here` is for nodes that are given already; `once` are options of sbatch for this submission alone.

    Raises:
        ToolkitError, OSError: the ranks could not begin or save as [checkpoint] says, the script cannot be rendered, or
            the folder cannot be written; no run is left behind.
    """
    check_source(job, once)
    check_codec(job)
    run = create_run(runs, job.job.name, access=job.paths.access)
    try:
        left_out = [] if here else nodes_left_out(job, runs)
        write_text(run.script(0), render_script(job, run, 0, left_out=left_out, once=once), mode=0o700)
        write_text(run.job_file, job.job_file.read_text(encoding="utf-8"))
        write_json(run.record, make_record(job, command=sys.argv))  # last: what has a record is a run
    except (ToolkitError, OSError):
        discard_run(run)
        raise
    return run


def submit(run: RunDirectory, job: ResolvedJob, start: int, *, echo: bool = False) -> Submitted:
    """Hand the script of a run over to Slurm, or start it in the background where there is none.

    Raises:
        SchedulerRefusedError: sbatch said no.
        ToolkitError: the run directory cannot be written; nothing was handed over.
        UnsettledError: nobody knows whether Slurm took the job; `status` and `resume` ask again.
    """
    from toolkit.batch.executors import LocalScriptExecutor, SlurmScriptExecutor  # submitit is heavy

    script = run.script(start)
    if not uses_slurm(job):
        job_id = LocalScriptExecutor(run, script).submit_script().job_id
        close_submission(run, start, job_id)
        return Submitted(run, start, job_id)
    if shutil.which("srun") is None:
        raise NotFoundError("srun and sbatch are not on PATH", fix="load Slurm's module, or use --site local")
    if not job.scheduler.conf:
        check_exported_conf(os.environ)
    _warn_of_variables()
    token = token_of(run.run_id, start)
    try:
        opened = open_submission(run, start, token, process_started=process_start_ticks(os.getpid()))
    except OSError as error:
        raise cannot_write(error) from error
    try:
        executor = SlurmScriptExecutor(run, script, slurm_of(job, echo=echo), comment_of(token, sbatch_words(job)))
        job_id = executor.submit_script().job_id
    except UnsettledError as error:
        raise UnsettledError(
            error.message,
            where=str(run.path),
            fix=f"the run is kept: ask `toolkit status {run.run_id}` twice, {SETTLE_S:.0f} s apart; where Slurm has no "
            f"such job, `toolkit resume {run.run_id}` submits it",
        ) from error
    except KeyboardInterrupt:
        sys.stderr.write(f"toolkit: sbatch was interrupted; `toolkit status {run.run_id}` finds its job\n")
        raise
    except ToolkitError:
        opened.unlink(missing_ok=True)
        raise
    close_submission(run, start, job_id)
    return Submitted(run, start, job_id)


def submit_new(run: RunDirectory, job: ResolvedJob, *, echo: bool = False) -> Submitted:
    """Submit a run that was just created; where it is refused, nothing of it stays.

    Raises:
        as `submit`.
    """
    try:
        return submit(run, job, 0, echo=echo)
    except UnsettledError:
        raise  # the job may be in the queue, and needs its folder
    except ToolkitError:
        discard_run(run)
        raise


def recorded_job(run: RunDirectory) -> ResolvedJob:
    """The job of a run as it was last submitted, with every layer applied."""
    path = newest_record(run)
    value: dict[str, Any] = read_json(path)
    try:
        return ResolvedJob.model_validate(value["job"])
    except (KeyError, ValidationError) as error:
        raise ToolkitError(
            "the record was not written by this version of toolkit, or is damaged",
            where=str(path),
            fix=f"read it with toolkit {value.get('toolkit', 'of that time')}, or submit {run.job_file} anew",
        ) from error


def _warn_of_variables() -> None:
    """sbatch's own variables without a key of ours would win over the script, so they are kept from it, and named."""
    from toolkit.config.layers import SBATCH_SWITCHES, SBATCH_VARIABLES

    known = {*SBATCH_VARIABLES, *SBATCH_SWITCHES}
    for name in sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in known):
        option = "--" + name.removeprefix("SBATCH_").lower().replace("_", "-")
        sys.stderr.write(f"toolkit: {name} is not used; write {option}={os.environ[name]} into job.sbatch\n")
