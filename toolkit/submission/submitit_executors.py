"""submitit executors that run toolkit's script instead of a pickle. Only this file uses private names of submitit.

They submit the rendered script of a run with sbatch; without Slurm, they run it in the background on this machine.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import SchedulerRefusedError, ToolkitError
from toolkit.rundir.claims import Part, open_submission, process_start_ticks
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.logs.job_log import last_directive
from toolkit.runs.record.job import sbatch_words
from toolkit.slurm.commands import NoAnswerError, Slurm
from toolkit.slurm.submit import comment_of, submit_once, token_of, without_job
from toolkit.submission.sweep.split import Slice, slices_instead

__all__ = ["LocalScriptExecutor", "ignore_interrupts", "start_local", "submit_to_slurm"]

# The log is named after the pid of the shell and, like the other files of the run, has mode 0600.
_START_LOCAL = 'log=$1/slurm-local-$$.out; (umask 077; : >>"$log"); exec >>"$log" 2>&1; exec bash "$2"'


class SlurmScriptExecutor(SlurmExecutor):
    """Submits the rendered script of a run with sbatch exactly once, even if the response of sbatch is lost.

    `options` override the #SBATCH lines of the script; `arguments` are passed to the script.
    """

    def __init__(
        self, run: RunDirectory, script: Path, slurm: Slurm, comment: str, *, options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(folder=run.path)
        self.run = run
        self.script = script
        self.slurm = slurm
        self.comment = comment
        self.options = options
        self.arguments = arguments

    def submit_script(self) -> SlurmJob[Any]:
        """Submit the script; the job id is `.job_id`."""
        (job,) = self._internal_process_submissions([])
        return job  # type: ignore[return-value]

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        return [self._submit_command(self._submitit_command_str)]

    @property
    def _submitit_command_str(self) -> str:
        return str(self.script)

    def _submit_command(self, command: str) -> core.Job[Any]:
        job_id = submit_once(
            self.slurm, Path(command), self.comment, options=self.options, arguments=self.arguments,
            hint=f"; Ctrl-C keeps the run, and `toolkit status {self.run.run_id}` finds the job",
        )  # fmt: skip
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


def submit_to_slurm(run: RunDirectory, job: ResolvedJob, start: int, slurm: Slurm) -> tuple[str, list[Part]]:
    """Submit the script of a start; return its job id and, if its array was split into several, the parts.

    Raises:
        SchedulerRefusedError: sbatch refused it.
        UnsettledError: toolkit cannot determine whether Slurm accepted it.
    """
    token = token_of(run.run_id, start)
    try:
        executor = SlurmScriptExecutor(run, run.script(start), slurm, comment_of(token, sbatch_words(job)))
        return executor.submit_script().job_id, []
    except NoAnswerError:
        raise
    except SchedulerRefusedError as error:
        slices = slices_instead(error, job, slurm)
    planned = [Part("", one.first, one.last) for one in slices]
    open_submission(run, start, token, process_started=process_start_ticks(os.getpid()), parts=planned)
    parts = _submit_slices(run, job, start, slices, slurm)
    return parts[0].job_id, parts


def _submit_slices(
    run: RunDirectory, job: ResolvedJob, start: int, slices: Sequence[Slice], slurm: Slurm
) -> list[Part]:
    """Submit all parts of an array, or none: if one is refused, the earlier ones are cancelled."""
    script, words = run.script(start), sbatch_words(job)
    depends = last_directive(script, "dependency", "d")
    parts: list[Part] = []
    for number, one in enumerate(slices):
        turn = [f"afterany:{parts[-1].job_id}"] if parts and "%" in one.array else []
        options = [f"--array={one.array}"]
        if turn:
            options.append("--dependency=" + ",".join([*([depends] if depends else []), *turn]))
        comment = comment_of(token_of(run.run_id, start, number), words)
        executor = SlurmScriptExecutor(run, script, slurm, comment, options=options, arguments=[str(one.first)])
        try:
            parts.append(Part(executor.submit_script().job_id, one.first, one.last))
        except NoAnswerError:
            raise
        except ToolkitError:
            if parts:
                slurm.cancel([part.job_id for part in parts])
            raise
    return parts


def ignore_interrupts() -> None:
    """Ignore SIGINT between fork and exec, so that Ctrl-C cannot end a script before its supervisor handles signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_local(run: RunDirectory, script: Path) -> subprocess.Popen[bytes]:
    """Start a script on this machine in its own session, so that Ctrl-C and a closed terminal do not end it."""
    return subprocess.Popen(
        ["bash", "-c", _START_LOCAL, "toolkit", str(run.path), str(script)],
        env={**without_job(os.environ), "TOOLKIT_LOCAL": "1"}, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=ignore_interrupts,
    )  # fmt: skip


class LocalScriptExecutor(LocalExecutor):
    """Runs the rendered script of a run in the background on this machine."""

    def __init__(self, run: RunDirectory, script: Path) -> None:
        super().__init__(folder=run.path)
        self.run = run
        self.script = script

    def submit_script(self) -> LocalJob[Any]:
        """Start the script as job `local-<pid>`; the supervisor has that pid, because the script ends with `exec`."""
        process = start_local(self.run, self.script)
        return LocalJob(folder=self.folder, job_id=f"local-{process.pid}", process=process)
