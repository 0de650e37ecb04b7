"""Calls of Slurm's commands: explicit formats, a scrubbed environment, a time-out, and errors in words.

A user's SQUEUE_FORMAT or SLURM_TIME_FORMAT would change what the commands print; they are removed for every call.
SBATCH_* would win over the script: those that have a key of ours are in the script already, the others must not add to it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.slurm.refusals import refusal_of

_SCRUBBED = (
    "SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN", "SCONTROL_",
)  # fmt: skip
_SEPARATOR = "\x1f"  # cannot stand in a job name that we accept


class NoAnswerError(SchedulerRefusedError):
    """A command of Slurm's did not end in time; what it asked for may have been done."""


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says of one job. `state` is Slurm's own word; "" stands for what it does not say."""

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    time_left: str = ""
    exit_code: str = ""
    source: str = ""


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands as one cluster's users call them. `configuration` is a slurm.conf, "" for the default."""

    configuration: str = ""
    echo: bool = False  # print each command on stderr before it runs
    timeout_s: float = 30.0

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for Slurm's commands."""
        source = os.environ if base is None else base
        environment = {name: value for name, value in source.items() if not name.startswith(_SCRUBBED)}
        if self.configuration:
            environment["SLURM_CONF"] = self.configuration
        return environment

    def call(self, argv: Sequence[str]) -> str:
        """Run one command and return its stdout.

        Raises:
            NotFoundError: the command is not on PATH.
            SchedulerRefusedError: it failed.
            NoAnswerError: it did not answer in `timeout_s`.
        """
        if shutil.which(argv[0]) is None:
            raise NotFoundError(f"{argv[0]} is not on PATH", fix="load Slurm's module, or use --site local")
        if self.echo:
            print("+ " + shlex.join(argv), file=sys.stderr)  # noqa: T201  --print-cmd asks for it
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", env=self.environment(), timeout=self.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NoAnswerError(
                f"{argv[0]} did not answer in {self.timeout_s:.0f} s",
                fix="`scontrol ping` says whether Slurm is up",
            ) from error
        if done.returncode:
            said, fix = refusal_of(done.stderr or done.stdout)
            raise SchedulerRefusedError(f"{argv[0]}: {said or f'exit code {done.returncode}'}", fix=fix)
        return done.stdout

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobFacts]:
        """Facts of each job that Slurm still knows: squeue first, then sacct, then scontrol. Others are left out."""
        wanted = list(job_ids)
        facts = self._queued(wanted) if wanted else {}
        missing = [job for job in wanted if job not in facts]
        if missing and shutil.which("sacct"):
            facts |= self._accounted(missing)
        for job in [job for job in wanted if job not in facts]:
            shown = self._shown(job)
            if shown is not None:
                facts[job] = shown
        return facts

    def _queued(self, job_ids: Sequence[str]) -> dict[str, JobFacts]:
        layout = _SEPARATOR.join(("%i", "%T", "%r", "%N", "%L"))
        try:
            text = self.call(
                ["squeue", "--noheader", "--states=all", f"--format={layout}", "--jobs=" + ",".join(job_ids)]
            )
        except SchedulerRefusedError as error:
            if "Invalid job id" in error.message:  # what squeue says of one job that it has forgotten
                return {}
            raise
        rows = (line.split(_SEPARATOR) for line in text.splitlines())
        return {
            row[0].strip(): JobFacts(row[0].strip(), row[1], row[2], row[3], row[4], source="squeue")
            for row in rows
            if len(row) == 5
        }

    def _accounted(self, job_ids: Sequence[str]) -> dict[str, JobFacts]:
        argv = ["sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations",
                "--format=JobIDRaw,State,NodeList,ExitCode", "--jobs=" + ",".join(job_ids)]  # fmt: skip
        try:
            text = self.call(argv)
        except SchedulerRefusedError:  # accounting is off on this cluster; scontrol is asked next
            return {}
        rows = (line.split(_SEPARATOR) for line in text.splitlines())
        return {
            row[0]: JobFacts(row[0], row[1], nodes=row[2], exit_code=row[3], source="sacct")
            for row in rows
            if len(row) == 4
        }

    def _shown(self, job_id: str) -> JobFacts | None:
        try:
            text = self.call(["scontrol", "--oneliner", "show", "job", job_id])
        except SchedulerRefusedError as error:
            if "Invalid job id" in error.message:
                return None
            raise
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if "JobState" not in fields:
            return None
        return JobFacts(
            job_id, fields["JobState"], fields.get("Reason", ""), fields.get("NodeList", ""),
            exit_code=fields.get("ExitCode", ""), source="scontrol",
        )  # fmt: skip

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; Slurm sends TERM to the batch script's children and to the supervisor."""
        self.call(["scancel", "--full", *job_ids])

    def requeue(self, job_id: str) -> None:
        """Put a running batch job back into the queue, under the same job id."""
        self.call(["scontrol", "requeue", job_id])
