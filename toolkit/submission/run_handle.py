"""`Run`: the handle of a submitted run for Python programs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState

if TYPE_CHECKING:
    from toolkit.runs.status.state_table import RunStatus

__all__ = ["Run", "RunFailedError"]

WAIT_PERIOD_S = 0.5


class RunFailedError(ToolkitError):
    """A run that did not succeed; the message is the reason that `toolkit status` shows."""

    exit_code = 1


@dataclass(frozen=True, repr=False)
class Run:
    """A run, or a task of an array run. Each call reads the files of the run and queries Slurm again.

    `submitted_job` is the id of the job that was submitted for this handle. `cluster` is "" for the site's own cluster.
    """

    path: Path
    submitted_job: str = field(default="", compare=False)
    cluster: str = field(default="", compare=False)

    @property
    def directory(self) -> RunDirectory:
        """The run directory, whose files docs/contract.md lists."""
        return RunDirectory(self.path)

    @property
    def run_id(self) -> str:
        return self.directory.run_id

    @property
    def job_id(self) -> str:
        """The Slurm id of the newest job; `local-PID` on a site without a scheduler."""
        from toolkit.rundir.run_files import read_run

        if not self.path.is_dir():
            raise NotFoundError(
                "the run directory no longer exists", where=str(self.path), fix="`toolkit history` lists runs"
            )
        return read_run(self.directory).job_id or self.submitted_job

    @property
    def state(self) -> RunState:
        """The state that `toolkit status` shows, a string such as "running"."""
        return self.status().state

    def status(self) -> RunStatus:
        """Return the state with its reason, the step and the shape."""
        from toolkit.runs.status.state import run_status

        return run_status(self.directory)

    def done(self) -> bool:
        """Return whether the run has ended, with or without success."""
        return self.state.final

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Wait until the run has ended, at most `timeout_s`, and return its state.

        Raises:
            CheckFailedError: the run was only rendered, so that no job will start it.
        """
        from toolkit.runs.follow.follow import Follower
        from toolkit.runs.status.state import require_submitted

        require_submitted(self.directory)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        follower = Follower(self.directory)
        while not follower.is_over():
            if deadline is not None and time.monotonic() >= deadline:
                break
            time.sleep(WAIT_PERIOD_S)
        return follower.look().state

    def exception(self) -> RunFailedError | None:
        """Wait for the run, and return its error; None if it succeeded."""
        if self.wait() is RunState.COMPLETED:
            return None
        return self._error(self.status())

    def result(self) -> Any:
        """Wait for the run, and return what its `main` returned: a JSON value, or None if it returned nothing.

        Raises:
            RunFailedError: the run did not complete.
        """
        error = self.exception()
        if error is not None:
            raise error
        stored = self.directory.result
        if not stored.exists():
            return None
        content = read_json(stored)
        if not isinstance(content, dict) or "value" not in content:
            raise ToolkitError("the stored result is damaged", where=str(stored), fix="resume or rerun the run")
        return content["value"]

    def _error(self, status: RunStatus) -> RunFailedError:
        from toolkit.runs.status.state_table import state_phrase

        attempt = self.directory.last_attempt()
        end = AttemptRecord.read(attempt) if attempt is not None else None
        fix = (end.fix if end is not None else "") or f"`toolkit explain {self.run_id}`"
        what = f"run {self.run_id} {state_phrase(status.state)}: {status.reason}"
        return RunFailedError(what, where=str(self.path), fix=fix)

    def logs(self, rank: int | None = None) -> str:
        """Return the log of a rank in the last attempt, or by default the log of the job."""
        from toolkit.runs.logs.log_choice import LogChoice, choose_logs
        from toolkit.runs.logs.logs import LogReader

        choice = LogChoice() if rank is None else LogChoice(rank=str(rank))
        return "".join(LogReader().read(choose_logs(self.directory, choice), to_the_end=True))

    def stdout(self) -> str | None:
        """Return the output of rank 0, whose log contains both streams; None if there is no log yet."""
        try:
            return self.logs(rank=0)
        except NotFoundError:
            return None

    def stderr(self) -> str | None:
        """Return the same log as `stdout`, because a rank writes both streams into one file."""
        return self.stdout()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics/train.jsonl`, one dictionary per line, with the metrics that the program recorded itself."""
        from toolkit.metrics.run_metrics import with_own
        from toolkit.rundir.files import read_lines

        path = self.directory.metrics / "train.jsonl"
        return with_own(path.parent, list(read_lines(path)) if path.exists() else [])

    def explain(self) -> str:
        """Return what `toolkit explain` prints: the state, its reason, and what to do."""
        from toolkit.runs.explain.explain import explain_run, lines_of

        return "\n".join(lines_of(explain_run(self.directory)))

    def cancel(self) -> None:
        """Request a checkpoint and the end of the run; `wait` returns when it has ended.

        Raises:
            CheckFailedError: the run has already ended.
        """
        from toolkit.runs.requests.cancel import cancel_run, cancel_task

        run = self.directory
        if run.task_number is None:
            cancel_run(run)
        else:
            cancel_task(run.whole, run.task_number)

    def tasks(self) -> list[Run]:
        """Return the tasks of an array run; [] for any other run."""
        from toolkit.runs.record.job import recorded_job

        numbers = recorded_job(self.directory).job.tasks or () if self.directory.task_number is None else ()
        return [Run(self.directory.task(number).path, cluster=self.cluster) for number in numbers]

    def __repr__(self) -> str:
        from toolkit.runs.status.state_table import state_phrase

        try:
            status = self.status()
        except (ToolkitError, OSError) as error:  # repr() must not raise
            return f"<Run {self.run_id}: {error}>"
        step = "" if status.step is None else f", step {status.step}"
        phrase = state_phrase(status.state)
        return f"<Run {self.run_id}: {status.job_name} {phrase} (job {status.full_job_id or 'none'}{step})>"

    def _repr_html_(self) -> str:
        try:
            status = self.status()
        except (ToolkitError, OSError) as error:
            return f"<pre>{escape(repr(self))}: {escape(str(error))}</pre>"
        rows = {
            "run": status.run_id, "job": f"{status.job_name} ({status.full_job_id or 'none'})",
            "state": status.state.value, "reason": status.reason, "site": status.site,
            "nodes, ranks": f"{status.nodes}, {status.ranks}", "step": "" if status.step is None else str(status.step),
            "folder": status.path,
        }  # fmt: skip
        lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items() if value)
        return f"<table>{''.join(lines)}</table>"
