"""The run directory: the place and the writer of every file of a run.

`RUNS/<job name>/<run id>/`. docs/contract.md lists every file with its only writer. Folders are 0700 and files
0600; `access = "group"` widens both.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from toolkit.rundir.files import cannot_write, make_folder, sync, typed_path, write_text

__all__ = [
    "AttemptDirectory", "RunDirectory", "create_run", "discard_run", "make_task", "new_run_id", "rank_of",
    "session_names", "sessions_folder", "start_of", "step_of",
]  # fmt: skip

AGAIN = ".again-"  # the prefix of the names of `RunDirectory.revived_marker`


def new_run_id(now: datetime | None = None) -> str:
    """A name that sorts by time, such as `20261120-142233-9f3a`: the last part is the fraction of the second."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond * 0x10000 // 1_000_000:04x}"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Creating the object does not touch the disk."""

    path: Path

    @property
    def task_number(self) -> int | None:
        """The number of this task of an array run; None for a whole run."""
        return int(self.path.name) if self.path.parent.name == "tasks" and self.path.name.isdigit() else None

    @property
    def whole(self) -> RunDirectory:
        """The run of a task; for a whole run, the run itself."""
        return self if self.task_number is None else RunDirectory(self.path.parent.parent)

    @property
    def run_id(self) -> str:
        """`20261120-142233-9f3a`; task 7 of an array run is `20261120-142233-9f3a_7`."""
        if self.task_number is None:
            return self.path.name
        return f"{self.whole.run_id}_{self.task_number}"

    @property
    def job_name(self) -> str:
        return self.whole.path.parent.name

    @property
    def job_file(self) -> Path:
        return self.whole.path / "job.toml"

    @property
    def record(self) -> Path:
        return self.whole.path / "record.json"

    def may_be_run(self) -> bool:
        """True if the folder has a record, or if this user may not read it."""
        try:
            return self.record.exists()
        except PermissionError:
            return True

    def code(self, start: int) -> Path:
        """The copy of the job's folder for the ranks of start `start`, and of those after it."""
        return self.whole.path / ("code" if start == 0 else f"code-{start:03}")

    @property
    def secret(self) -> Path:
        return self.whole.path / "secret"

    @property
    def sweep(self) -> Path:
        """The values of each task of a sweep that override the job's."""
        return self.whole.path / "sweep.json"

    @property
    def calls(self) -> Path:
        """The function and the arguments of each task of an executor's run."""
        return self.whole.path / "calls.json"

    @property
    def result(self) -> Path:
        """Written by rank 0: what `main` of this run, or of this task, returned."""
        return self.path / "result.json"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks"

    def task(self, number: int) -> RunDirectory:
        """One task of an array run: its own run directory, except for what all tasks share."""
        return RunDirectory(self.tasks / str(number))

    def task_numbers(self) -> list[int]:
        """The tasks that have started."""
        return _numbers(self.tasks)

    def with_tasks(self) -> list[RunDirectory]:
        """The run, and its tasks that have started."""
        return [self, *map(self.task, self.task_numbers())]

    @property
    def control(self) -> Path:
        return self.path / "control"

    def is_asked(self, request: str) -> bool:
        """True if `control/` contains a request such as "stop".

        A request to a whole array applies to its tasks, but not to a task that was resumed: requests are also written into
        the folders of running tasks.
        """
        if (self.control / request).exists():
            return True
        if self.task_number is None or not (self.whole.control / request).exists():
            return False
        return not self.resumed_starts()

    @property
    def revived_marker(self) -> Path:
        """Empty file next to the run; tells caches that the run continued after an attempt ended."""
        return self.whole.path.with_name(f"{AGAIN}{self.whole.run_id}")

    @property
    def starts(self) -> Path:
        return self.path / "starts"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def committed_checkpoints(self) -> list[Path]:
        """The folders of complete checkpoints, the oldest first."""
        folders = (path for path in self.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def links(self) -> Path:
        """Written by rank 0: the measured speed of the links between the ranks, for later attempts."""
        return self.path / "links.json"

    @property
    def layer_times(self) -> Path:
        """Written by rank 0: the measured times of the model's parts, for later attempts."""
        return self.path / "layer_times.json"

    def script(self, start: int) -> Path:
        """The rendered script whose first start is `start`; the first script is `job.sbatch`."""
        return self.whole.path / "job.sbatch" if start == 0 else self.path / f"job-{start:03}.sbatch"

    def submitting(self, start: int) -> Path:
        """Written before sbatch is called for start `start`, removed once it has answered."""
        return self.path / f"submitting-{start:03}.json"

    def submitted(self, start: int) -> Path:
        """Written when start `start` was submitted to the scheduler."""
        return self.path / f"submitted-{start:03}.json"

    def resumed(self, start: int) -> Path:
        """Written by the resume that created start `start`."""
        return self.path / f"resumed-{start:03}.json"

    def resumed_starts(self) -> list[int]:
        """The starts of this run, or of this task, that a resume created; a resume of an array may omit tasks."""
        submitted = map(start_of, self.path.glob("submitted-*.json"))
        return sorted(number for number in {*self.start_numbers(), *submitted} if self.whole.resumed(number).exists())

    def start(self, number: int) -> Path:
        return self.starts / f"{number:03}"

    def attempt(self, number: int) -> AttemptDirectory:
        return AttemptDirectory(self.attempts / f"{number:03}")

    def start_numbers(self) -> list[int]:
        return _numbers(self.starts)

    def attempt_numbers(self) -> list[int]:
        return _numbers(self.attempts)

    def last_attempt(self) -> AttemptDirectory | None:
        numbers = self.attempt_numbers()
        return self.attempt(numbers[-1]) if numbers else None


@dataclass(frozen=True)
class AttemptDirectory:
    """Paths of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> RunDirectory:
        """The run, or the task, of this attempt."""
        return RunDirectory(self.path.parent.parent)

    @property
    def start_file(self) -> Path:
        return self.path / "start.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def exit_file(self) -> Path:
        return self.path / "exit.json"

    @property
    def reserve(self) -> Path:
        """Reserved disk space that is released to write `exit.json`."""
        return self.path / "reserve"

    @property
    def rehearsed(self) -> Path:
        """Written by `toolkit rehearse`: the failure that it caused in this attempt."""
        return self.path / "rehearsed.json"

    @property
    def stop_flag(self) -> Path:
        """Written by the supervisor: the ranks must save and exit at the next step boundary."""
        return self.path / "stop"

    @property
    def ends_at(self) -> Path:
        """Written by the supervisor if the allocation's end has moved: seconds since the epoch, UTC."""
        return self.path / "ends_at"

    @property
    def rendezvous(self) -> Path:
        """Written by rank 0: the address of the store."""
        return self.path / "rendezvous.json"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def ranks(self) -> Path:
        """One file per rank at its start, one at its end: `rank-00003.json`, `rank-00003.done`."""
        return self.path / "ranks"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def usage(self) -> Path:
        """One file per node, written by the guard of its first rank: used CPU time, memory and GPUs."""
        return self.path / "usage"

    def error_file(self, rank: int) -> Path:
        return self.errors / f"rank-{rank:05}.json"

    def stack_file(self, rank: int) -> Path:
        """The stacks of a rank's threads when the attempt stalled."""
        return self.errors / f"rank-{rank:05}.stack"

    def rank_file(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05}.json"

    def done_marker(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05}.done"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def node_log(self, host: str) -> Path:
        """The log of all ranks on a host, used if there are too many ranks for one file each."""
        return self.logs / f"node-{host}.log"

    @property
    def launcher_log(self) -> Path:
        """The output of srun or mpirun, and of programs that fail before they become ranks."""
        return self.logs / "launcher.log"

    def usage_file(self, first_rank: int) -> Path:
        """The resource usage of the ranks of one node, named by the node's first rank."""
        return self.usage / f"rank-{first_rank:05}.json"

    def make_folders(self) -> None:
        """Make the folders of a newly claimed attempt."""
        for folder in (self.errors, self.ranks, self.logs, self.usage):
            make_folder(folder)


def start_of(path: Path) -> int:
    """The start in the name of a file such as `submitted-001.json`."""
    return _number_behind_dash(path)


def rank_of(path: Path) -> int:
    """The rank in the name of a file such as `rank-00003.json` or `rank-3.log`."""
    return _number_behind_dash(path)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a committed checkpoint, `step-00001000`."""
    return _number_behind_dash(checkpoint)


def _number_behind_dash(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    except FileNotFoundError:
        return []


def make_task(run: RunDirectory, number: int) -> RunDirectory:
    """Make the folder of a task for its first supervisor; a later start of the task finds it."""
    task = run.task(number)
    for folder in (run.tasks, task.path, *_folders_of(task)):
        with suppress(FileExistsError):
            make_folder(folder)
    return task


def _folders_of(run: RunDirectory) -> tuple[Path, ...]:
    return run.control, run.starts, run.attempts, run.checkpoints, run.metrics


def create_run(runs: Path, job_name: str, *, access: str = "user") -> RunDirectory:
    """Make an empty run directory with its secret.

    It must exist before any job of the run, since Slurm opens the log inside it. `access` is
    "user" (0700) or "group" (0750).

    Raises:
        ToolkitError: the folder cannot be written; no part of the run remains.
    """
    run = None
    try:
        is_first = not (runs / job_name).exists()
        (runs / job_name).mkdir(parents=True, exist_ok=True)
        if is_first:
            sync(runs)
        run = _make_next((runs / job_name).resolve())
        run.path.chmod(0o750 if access == "group" else 0o700)
        for folder in _folders_of(run):
            make_folder(folder)
        write_text(run.secret, secrets.token_hex(32) + "\n", mode=0o600)  # only for the owner, with any access
    except BaseException as error:  # also Ctrl-C
        if run is not None:
            discard_run(run)
        if isinstance(error, OSError):
            raise cannot_write(error, action="cannot make a run directory", where=runs) from error
        raise
    return run


def discard_run(run: RunDirectory) -> None:
    """Remove a run that never started, and the job's folder if the run was the only one in it."""
    shutil.rmtree(run.path)
    with suppress(OSError):
        run.path.parent.rmdir()


def _make_next(job_folder: Path) -> RunDirectory:
    """Make the folder of a new run; two that are created at the same instant get different names."""
    while True:
        run = RunDirectory(job_folder / new_run_id())
        try:
            run.path.mkdir(mode=0o700)
        except FileExistsError:
            continue  # until the clock advances
        sync(job_folder)
        return run


def sessions_folder() -> Path:
    """The folder of all sessions, which is made when it is not there."""
    folder = typed_path("~/.toolkit/sessions")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def session_names() -> list[str]:
    """The names of all sessions."""
    return sorted(path.stem for path in sessions_folder().glob("*.json"))
