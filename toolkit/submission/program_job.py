"""The job file that a program submitted without one would have: shown, and written with --save-as."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import indent

from toolkit.config.job_file_text import job_file_text
from toolkit.config.program_document import is_program
from toolkit.config.request import JobRequest, resolve
from toolkit.config.shipped import find_job
from toolkit.errors import ToolkitError
from toolkit.rundir.files import write_text
from toolkit.terminal.talk import say

__all__ = ["require_new_file", "save_job_file", "show_job_file"]


def show_job_file(request: JobRequest, save_as: Path | None) -> None:
    """Print the job file of a program on stderr, unless `save_job_file` will write it; nothing for any other JOB.

    Raises:
        ToolkitError: the request is invalid, the file exists, or JOB is not a program.
    """
    if save_as is not None:
        require_new_file(save_as, "--save-as")
    path = find_job(request.job)
    if not is_program(path):
        if save_as is None and path.suffix != ".py":
            return
        job = resolve(replace(request, ranks=None), None)
        if save_as is not None:
            fix = f"`toolkit import {job.job_file}`" if job.job.once else f"cp {job.job_file} {save_as}"
            raise ToolkitError("--save-as expects a program as JOB", where=str(job.job_file), fix=fix)
        ranks = max(request.ranks or 1, job.job.max_nodes * job.job.ranks_per_node)
        if job.job.once and ranks > 1:
            say(
                f"{job.job_file.name} starts with `#!`, so it runs once, as with sbatch. "
                f"Fix: remove that line, or add --set job.once=false, to start {ranks} ranks"
            )
        return
    text = job_file_text(resolve(request, None)).rstrip()
    if save_as is None:
        say(f"{request.job} is submitted as this job file, which --save-as FILE writes:")
        sys.stderr.write(indent(text, "  ") + "\n")


def save_job_file(request: JobRequest, save_as: Path) -> None:
    """Write the job file of a program that was submitted, and print the command that submits it."""
    job = resolve(request, None)
    write_text(save_as, job_file_text(job, save_as.parent.absolute()), mode=0o644)
    options = [f"--sweep={one}" for one in request.sweeps] + [f"--after={one}" for one in request.after]
    options += [f"--{name}={value}" for name in ("grid", "site", "runs") if (value := getattr(request, name))]
    say(
        f"wrote {save_as}; the same job: toolkit submit {shlex.join([str(save_as), *options, *request.sbatch_options])}"
    )


def require_new_file(path: Path, option: str) -> None:
    """Refuse the path of a file to write that exists, or whose folder does not.

    Raises:
        ToolkitError: it cannot be a new file.
    """
    problem = (
        ("expected the name of a file", f"omit {option} to print the job file") if str(path) == "-"
        else (f"the {'folder' if path.is_dir() else 'file'} exists", f"choose the name of a new file with {option}")
        if path.exists()
        else ("folder of the file not found", f"mkdir -p {path.parent}") if not path.parent.is_dir() else None
    )  # fmt: skip
    if problem is not None:
        raise ToolkitError(problem[0], where=str(path), fix=problem[1])
