"""The paths of all files of a run in its run directory, `RUNS/<job name>/<run id>/`.

docs/contract.md lists each file with its only writer. Folders have mode 0700 and files 0600, unless `access = "group"`.
A *start* is one execution of the job script: the first, after a requeue or a resume, or as a repeated job. An *attempt*
is one launch of all ranks within a start.
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

AGAIN = ".again-"  # the prefix of the file name of `RunDirectory.revived_marker`


def new_run_id(now: datetime | None = None) -> str:
    """Return a run id that sorts by time, such as `20261120-142233-9f3a`; its last part is a fraction of a second."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond * 0x10000 // 1_000_000:04x}"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, or of one task of an array run. Creating the object does not touch the disk."""

    path: Path

    @property
    def task_number(self) -> int | None:
        """The task number if this is the folder of an array task, or None for a whole run."""
        return int(self.path.name) if self.path.parent.name == "tasks" and self.path.name.isdigit() else None

    @property
    def whole(self) -> RunDirectory:
        """The run to which a task belongs; for a whole run, the run itself."""
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
    def batch_script(self) -> Path:
        """The script of the user that runs once on the first node, as submitted."""
        return self.whole.path / "job.sh"

    @property
    def record(self) -> Path:
        return self.whole.path / "record.json"

    def may_be_run(self) -> bool:
        """Return True if the folder contains record.json, or if this user has no permission to check."""
        try:
            return self.record.exists()
        except PermissionError:
            return True

    def code(self, start: int) -> Path:
        """Return the copy of the user's code for the ranks of start `start`, and of later starts without a copy."""
        return self.whole.path / ("code" if start == 0 else f"code-{start:03}")

    @property
    def secret(self) -> Path:
        return self.whole.path / "secret"

    @property
    def sweep(self) -> Path:
        """The values of each task of a sweep that override those of the job file."""
        return self.whole.path / "sweep.json"

    @property
    def calls(self) -> Path:
        """The function and arguments of each task, for a run that an `AutoExecutor` submitted."""
        return self.whole.path / "calls.json"

    @property
    def result(self) -> Path:
        """Written by rank 0: the return value of `main` of this run or task."""
        return self.path / "result.json"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks"

    def task(self, number: int) -> RunDirectory:
        """Return the run directory of an array task; files that all tasks share are in the directory of the run."""
        return RunDirectory(self.tasks / str(number))

    def task_numbers(self) -> list[int]:
        """Return the numbers of the tasks that have started."""
        return _numbers(self.tasks)

    def with_tasks(self) -> list[RunDirectory]:
        """Return the run itself and those of its tasks that have started."""
        return [self, *map(self.task, self.task_numbers())]

    @property
    def control(self) -> Path:
        return self.path / "control"

    def is_asked(self, request: str) -> bool:
        """Return True if `control/` contains a request such as "stop"."""
        return self.asked_file(request) is not None

    def asked_file(self, request: str) -> Path | None:
        """Return the file in `control/` of a request such as "stop"; None if there is none.

        A request to a whole array applies to its tasks, except to a task that a resume has started. Such a task obeys
        only requests in its own folder.
        """
        if (own := self.control / request).exists():
            return own
        if self.task_number is None or not (of_all := self.whole.control / request).exists():
            return None
        return None if self.resumed_starts() else of_all

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
        """Return the folders of committed checkpoints, lowest step first."""
        folders = (path for path in self.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def trackers(self) -> Path:
        """What `observe.trackers` keep: how far each has sent the metrics, and its own files."""
        return self.path / "trackers"

    @property
    def outbox(self) -> Path:
        """Notifications that no host has sent yet; those that were sent are in the folder `sent` next to it."""
        return self.path / "alerts" / "outbox"

    @property
    def links(self) -> Path:
        """Written by rank 0: the measured speed of the links between ranks, for later attempts."""
        return self.path / "links.json"

    @property
    def layer_times(self) -> Path:
        """Written by rank 0: the measured times of the layers of the model, for later attempts."""
        return self.path / "layer_times.json"

    @property
    def micro_batch(self) -> Path:
        """Written before a start: the size that toolkit found for `train.micro_batch = "auto"`, and its layout."""
        return self.path / "micro_batch.json"

    def script(self, start: int) -> Path:
        """Return the path of the script rendered for start number `start`; start 0 uses `job.sbatch`."""
        return self.whole.path / "job.sbatch" if start == 0 else self.path / f"job-{start:03}.sbatch"

    def submitting(self, start: int) -> Path:
        """Return the file that is written before sbatch is called for a start, and removed when sbatch responds."""
        return self.path / f"submitting-{start:03}.json"

    def submitted(self, start: int) -> Path:
        """Return the file that is written after start `start` was submitted to the scheduler."""
        return self.path / f"submitted-{start:03}.json"

    def resumed(self, start: int) -> Path:
        """Return the file that is written by the resume that created start `start`."""
        return self.path / f"resumed-{start:03}.json"

    def resumed_starts(self) -> list[int]:
        """Return the starts of this run or task that a resume created; a resume of an array may exclude tasks."""
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
    """The paths of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> RunDirectory:
        """The run or task to which this attempt belongs."""
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
    def matched_files(self) -> Path:
        """The files that `restart.progress` matched at the end of the attempt."""
        return self.path / "matched_files.json"

    @property
    def reserve(self) -> Path:
        """Reserved disk space, which is released to write `exit.json` on a full disk."""
        return self.path / "reserve"

    @property
    def rehearsed(self) -> Path:
        """Written by `toolkit rehearse`: the failure that it injected into this attempt."""
        return self.path / "rehearsed.json"

    @property
    def stop_flag(self) -> Path:
        """Written by the supervisor: a request to all ranks to save and exit at the next step boundary."""
        return self.path / "stop"

    @property
    def ends_at(self) -> Path:
        """Written by the supervisor if the end time of the allocation changed: seconds since the epoch, UTC."""
        return self.path / "ends_at"

    @property
    def stacks_request(self) -> Path:
        """Written by the supervisor: a request to the guards of other nodes to keep the stacks of their ranks."""
        return self.path / "stacks"

    @property
    def validating(self) -> Path:
        """Exists while rank 0 validates."""
        return self.path / "validating"

    @property
    def rendezvous(self) -> Path:
        """Written by rank 0: the address of the rendezvous store."""
        return self.path / "rendezvous.json"

    @property
    def mesh(self) -> Path:
        """Written by rank 0: the sizes of the mesh, and the pipeline stage of each rank."""
        return self.path / "mesh.json"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def ranks(self) -> Path:
        """A rank writes `rank-00003.json` when it starts and `rank-00003.done` when it has finished."""
        return self.path / "ranks"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def usage(self) -> Path:
        """One file per node with its CPU, memory and GPU usage, written by the guard process of its first rank."""
        return self.path / "usage"

    @property
    def windows(self) -> Path:
        """One file per node with the statistics of its ranks' steps, written by the guard process of its first rank."""
        return self.path / "windows"

    def windows_file(self, first_rank: int) -> Path:
        """Return the windows of the ranks on one node, named after the first rank on it."""
        return self.windows / f"rank-{first_rank:05}.bin"

    def node_state(self, first_rank: int) -> Path:
        """Return the last state of one node's memory, GPUs and network devices, named after the first rank on it."""
        return self.windows / f"rank-{first_rank:05}.json"

    def error_file(self, rank: int) -> Path:
        return self.errors / f"rank-{rank:05}.json"

    def stack_file(self, rank: int) -> Path:
        """Return the stack traces of a rank's threads when the attempt stalled, or at the last `toolkit stacks`."""
        return self.errors / f"rank-{rank:05}.stack"

    def flight_file(self, rank: int) -> Path:
        """Return the last collectives of a rank at the same time, if torch's flight recorder is on."""
        return self.errors / f"rank-{rank:05}.flight"

    @property
    def kernels(self) -> Path:
        """`request.json`, written by `toolkit trace --kernels`, and the kernels that each rank recorded for it."""
        return self.path / "kernels"

    def rank_file(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05}.json"

    def done_marker(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05}.done"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def node_log(self, host: str) -> Path:
        """Return the log of all ranks on a host, which is used if there are too many ranks for one file each."""
        return self.logs / f"node-{host}.log"

    @property
    def launcher_log(self) -> Path:
        """The output of srun or mpirun, and of rank processes that fail during startup."""
        return self.logs / "launcher.log"

    def usage_file(self, first_rank: int) -> Path:
        """Return the resource usage of the ranks on one node, named after the first rank on it."""
        return self.usage / f"rank-{first_rank:05}.json"

    def make_folders(self) -> None:
        """Make the folders of a newly claimed attempt."""
        for folder in (self.errors, self.ranks, self.logs, self.usage, self.windows):
            make_folder(folder)


def start_of(path: Path) -> int:
    """Return the start number in a file name such as `submitted-001.json`."""
    return _number_behind_dash(path)


def rank_of(path: Path) -> int:
    """Return the rank in a file name such as `rank-00003.json` or `rank-3.log`."""
    return _number_behind_dash(path)


def step_of(checkpoint: Path) -> int:
    """Return the step in the folder name of a committed checkpoint, such as `step-00001000`."""
    return _number_behind_dash(checkpoint)


def _number_behind_dash(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    except FileNotFoundError:
        return []


def make_task(run: RunDirectory, number: int) -> RunDirectory:
    """Make the folder of a task, unless an earlier start of the task has made it."""
    task = run.task(number)
    for folder in (run.tasks, task.path, *_folders_of(task)):
        with suppress(FileExistsError):
            make_folder(folder)
    return task


def _folders_of(run: RunDirectory) -> tuple[Path, ...]:
    return run.control, run.starts, run.attempts, run.checkpoints, run.metrics


def create_run(runs: Path, job_name: str, *, access: str = "user") -> RunDirectory:
    """Make an empty run directory with its secret, which must exist before a job starts: Slurm opens the log inside it.

    `access` is "user" (0700) or "group" (0750).

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
        write_text(run.secret, secrets.token_hex(32) + "\n", mode=0o600)  # for the owner only, regardless of `access`
    except BaseException as error:  # including Ctrl-C
        if run is not None:
            discard_run(run)
        if isinstance(error, OSError):
            raise cannot_write(error, action="cannot create a run directory", where=runs) from error
        raise
    return run


def discard_run(run: RunDirectory) -> None:
    """Remove a run that never started, and the folder of its job if no other run is in it."""
    shutil.rmtree(run.path)
    with suppress(OSError):
        run.path.parent.rmdir()


def _make_next(job_folder: Path) -> RunDirectory:
    """Make the folder of a new run. Runs that are created at the same instant get different names."""
    while True:
        run = RunDirectory(job_folder / new_run_id())
        try:
            run.path.mkdir(mode=0o700)
        except FileExistsError:
            continue  # try again until the clock advances
        sync(job_folder)
        return run


def sessions_folder() -> Path:
    """Return the folder of all sessions, after creating it if it does not exist."""
    folder = typed_path("~/.toolkit/sessions")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def session_names() -> list[str]:
    """Return the names of all sessions."""
    return sorted(path.stem for path in sessions_folder().glob("*.json"))
