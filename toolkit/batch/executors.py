"""submitit's executors, with our script as their text and without their pickles.

`sbatch` gets the rendered script of a run; where there is no Slurm, the same script runs in the background of this
machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.commands import Slurm
from toolkit.slurm.submit import submit_once, without_job

# The shell's own pid names the log, 0600 as the run's other files, before anything else runs.
_START_LOCAL = 'log=$1/slurm-local-$$.out; (umask 077; : >>"$log"); exec >>"$log" 2>&1; exec bash "$2"'


class SlurmScriptExecutor(SlurmExecutor):
    """Submits a run's rendered script with sbatch, as one job whatever becomes of sbatch's answer."""

    def __init__(self, run: RunDirectory, script: Path, slurm: Slurm, comment: str) -> None:
        super().__init__(folder=run.path)
        self.script = script
        self.slurm = slurm
        self.comment = comment

    def submit_script(self) -> SlurmJob[Any]:
        """Submit; the job's id is `.job_id`."""
        (job,) = self._internal_process_submissions([])
        return job  # type: ignore[return-value]

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        return [self._submit_command(self._submitit_command_str)]

    @property
    def _submitit_command_str(self) -> str:
        return str(self.script)

    def _submit_command(self, command: str) -> core.Job[Any]:
        job_id = submit_once(self.slurm, Path(command), self.comment)
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])


def ignore_interrupts() -> None:
    """Called between fork and exec: a script does not die of an interrupt before its supervisor hears them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_local(run: RunDirectory, script: Path) -> subprocess.Popen[bytes]:
    """Start a script on this machine, in a session of its own: no terminal's Ctrl-C or hang-up reaches it."""
    return subprocess.Popen(
        ["bash", "-c", _START_LOCAL, "toolkit", str(run.path), str(script)],
        env={**without_job(os.environ), "TOOLKIT_LOCAL": "1"}, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=ignore_interrupts,
    )  # fmt: skip


class LocalScriptExecutor(LocalExecutor):
    """Runs a run's rendered script in the background of this machine."""

    def __init__(self, run: RunDirectory, script: Path) -> None:
        super().__init__(folder=run.path)
        self.run = run
        self.script = script

    def submit_script(self) -> LocalJob[Any]:
        """Start; the job's id is `local-<pid>`, and the pid is the supervisor's since the script ends in `exec`."""
        process = start_local(self.run, self.script)
        return LocalJob(folder=self.folder, job_id=f"local-{process.pid}", process=process)
