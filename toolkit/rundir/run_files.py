"""Reads the files on which the state of a run depends, each of them once. Does not read usage, rank files or logs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.errors import DamagedFileError
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import Part, StartClaim, parts_in, read_claim, slurm_id
from toolkit.rundir.files import read_json, read_json_or_none
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.sweep import Sweep, read_sweep

__all__ = [
    "AttemptFiles", "FolderFiles", "RecordedJob", "RecordedScheduler", "RunFiles", "StartFiles", "damaged_record",
    "has_changed", "read_folder", "read_run",
]  # fmt: skip

# The tables that each recorded job must have; a record without one of them is damaged.
_TABLES = (
    "job", "env", "container", "restart", "checkpoint", "data", "train", "parallel", "site", "scheduler", "launcher",
    "gpu", "site_env", "network", "paths", "site_container",
)  # fmt: skip


@dataclass(frozen=True)
class RecordedScheduler:
    """The scheduler of a site. `kind`: "slurm" or "local". `conf`: path of slurm.conf. `cluster`: its name or ""."""

    kind: str
    conf: str
    cluster: str


@dataclass(frozen=True)
class RecordedJob:
    """The settings of a recorded job on which the state of its run depends.

    `ranks` is the smallest number of ranks that the job accepts. `cluster` is "" unless the job itself names a cluster.
    """

    site: str
    scheduler: RecordedScheduler
    cluster: str
    array: str
    nodes: int | str
    ranks: int

    @property
    def uses_slurm(self) -> bool:
        """False if the job runs as a local process."""
        return self.scheduler.kind == "slurm"


@dataclass(frozen=True)
class StartFiles:
    """One start: its claim, None if not claimed, and whether it has ended."""

    claim: StartClaim | None
    has_ended: bool


@dataclass(frozen=True)
class AttemptFiles:
    """The last attempt: how it started and ended (None if it has not yet), and the last step in its heartbeat."""

    directory: AttemptDirectory
    begun: StartRecord | None
    end: AttemptRecord | None
    step: int | None


@dataclass(frozen=True)
class FolderFiles:
    """The folder of a run, or of one task of an array run.

    `submissions` maps each submitted start to its job id, `parts` to the parts of an array that was submitted in parts.
    `open_start` is a start for which sbatch has not responded. `attempts` are all attempt numbers, `attempt` the files
    of the last one. `asks_cancel` is true if this folder contains a cancel request; `changed_ns` is its mtime.
    """

    directory: RunDirectory
    submissions: Mapping[int, str] = field(default_factory=dict)
    parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    open_start: int | None = None
    resumed: tuple[int, ...] = ()
    starts: Mapping[int, StartFiles] = field(default_factory=dict)
    attempts: tuple[int, ...] = ()
    attempt: AttemptFiles | None = None
    asks_cancel: bool = False
    changed_ns: int = 0

    @property
    def last_submitted(self) -> int:
        """The newest submitted start; 0 if there is none."""
        return max(self.submissions, default=0)

    @property
    def final_end(self) -> AttemptRecord | None:
        """The end that the last attempt recorded, if it is final and no later start was submitted; else None."""
        attempt = self.attempt
        if attempt is None or attempt.end is None or not attempt.end.final or attempt.begun is None:
            return None
        return attempt.end if self.last_submitted <= attempt.begun.start else None

    def claims_of(self, job_id: str) -> list[tuple[StartClaim, bool]]:
        """Return the claims of a job or of all tasks of an array job, newest first, and whether each start has ended."""
        newest_first = (self.starts[number] for number in sorted(self.starts, reverse=True))
        return [
            (start.claim, start.has_ended)
            for start in newest_first
            if start.claim is not None and job_id in (start.claim.job_id, start.claim.job_id.partition("_")[0])
        ]

    @cached_property
    def job_ids(self) -> list[str]:
        """The ids of the jobs that were submitted or have claimed a start, without duplicates, newest last."""
        claimed = [(number, start.claim.job_id) for number, start in self.starts.items() if start.claim is not None]
        submitted = [
            (number, job_id)
            for number, job in self.submissions.items()
            for job_id in ([part.job_id for part in self.parts[number]] or [job])
        ]
        newest_first = sorted(submitted + claimed, key=lambda start: start[0], reverse=True)
        return list(dict.fromkeys(job_id for _, job_id in newest_first if job_id))[::-1]


@dataclass(frozen=True)
class RunFiles:
    """The files of a run or of one task of an array run. `whole` is the folder of the run; `folder` may be the same.

    `tasks` contains the started tasks of an array. For a single task it is empty, unless only the claims of the tasks
    contain the job id of the array. `first_array` is `job.array` as it was first submitted. `host` is where the run was
    submitted; "" if no state depends on it.
    """

    folder: FolderFiles
    whole: FolderFiles
    job: RecordedJob
    tasks: Mapping[int, FolderFiles] = field(default_factory=dict)
    sweep: Sweep | None = None
    first_array: str = ""
    host: str = ""

    @property
    def run(self) -> RunDirectory:
        return self.folder.directory

    @property
    def is_array(self) -> bool:
        return bool(self.job.array) and self.run.task_number is None

    @property
    def job_id(self) -> str:
        """The Slurm id of the newest job, or of a task within its array job; "" if there is none yet."""
        number, ids = self.run.task_number, self.folder.job_ids
        if number is None:  # only all repeated jobs together, 123_1 and 123_2, show whether the run continues
            return self._array_job
        return ids[-1] if ids else slurm_id(self.newest_parts, self._array_job, number)

    @property
    def _array_job(self) -> str:
        if ids := self.whole.job_ids:
            return ids[-1].partition("_")[0]
        # The user submitted the script with sbatch, so only the claims of the tasks contain the job id of the array.
        claimed = [(start, job_id) for task in self.tasks.values() for start, job_id in _array_claims(task)]
        return max(claimed, key=lambda claim: claim[0])[1] if claimed else ""

    @property
    def newest_parts(self) -> tuple[Part, ...]:
        """The parts of the newest submission; () if it was submitted as one Slurm array."""
        return self.whole.parts[self.whole.last_submitted] if self.whole.submissions else ()

    def is_cancel_asked(self, folder: FolderFiles) -> bool:
        """Return True if `folder` is to be cancelled. A request to an array does not apply to its resumed tasks."""
        if folder.asks_cancel or folder is self.whole:
            return folder.asks_cancel
        return self.whole.asks_cancel and not {*folder.starts, *folder.submissions} & set(self.whole.resumed)


def read_run(run: RunDirectory) -> RunFiles:
    """Read the files on which the state of a run or task depends, each of them once.

    Raises:
        DamagedFileError: a file is damaged, or another version of toolkit wrote it.
        FileNotFoundError: the run was removed.
    """
    resumed = _numbered_files(run.whole)["resumed"]
    newest = run.whole.resumed(max(resumed)) if resumed else run.record
    record = read_json(newest)
    job = _job_of(record, newest)
    whole = read_folder(run.whole, with_step=run.task_number is None)
    if run.task_number is not None:
        folder = read_folder(run, with_step=True)
        of_array = {} if whole.job_ids else _read_tasks(run.whole)
        return RunFiles(folder, whole, job, of_array, read_sweep(run), "", _host_of(folder, record, newest, run))
    if not job.array:
        return RunFiles(whole, whole, job, host=_host_of(whole, record, newest, run))
    first = record if newest == run.record else read_json(run.record)
    return RunFiles(whole, whole, job, _read_tasks(run), read_sweep(run), _array_of(first))


def read_folder(directory: RunDirectory, *, with_step: bool = False) -> FolderFiles:
    """Read the folder of a run or task; `with_step` also reads the heartbeat of its last attempt.

    Raises:
        DamagedFileError: a file is damaged.
    """
    changed_ns = _changed_ns(directory)
    numbered = _numbered_files(directory)
    if not changed_ns and directory.task_number is not None:
        return FolderFiles(directory)  # the task has not started
    submissions, parts = {}, {}
    for start in sorted(numbered["submitted"]):
        recorded = read_json_or_none(directory.submitted(start)) or {}
        submissions[start], parts[start] = (
            str(recorded.get("job_id", "")),
            tuple(parts_in(recorded)) if "parts" in recorded else (),
        )
    opened = max(numbered["submitting"], default=-1)
    attempts = tuple(directory.attempt_numbers())
    return FolderFiles(
        directory, submissions, parts, opened if opened > max(submissions, default=-1) else None,
        tuple(sorted(numbered["resumed"])), {number: _read_start(directory, number) for number in directory.start_numbers()},
        attempts, _read_attempt(directory.attempt(attempts[-1]), with_step=with_step) if attempts else None,
        (directory.control / "cancel").exists(), changed_ns,
    )  # fmt: skip


def has_changed(files: RunFiles) -> bool:
    """Return True if a start of a run was submitted or resumed after its files were read."""
    return any(_changed_ns(folder.directory) != folder.changed_ns for folder in (files.folder, files.whole))


def _changed_ns(directory: RunDirectory) -> int:
    """Return the time in ns when an entry was last added to or removed from the folder; 0 if there is no folder."""
    try:
        return directory.path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _numbered_files(directory: RunDirectory) -> dict[str, list[int]]:
    """Return the start numbers in the names `submitted-SSS.json`, `submitting-SSS.json`, `resumed-SSS.json` by kind."""
    numbered: dict[str, list[int]] = {"submitted": [], "submitting": [], "resumed": []}
    try:
        names = os.listdir(directory.path)  # noqa: PTH208  creating a Path for each entry of 100,000 runs is slow
    except (FileNotFoundError, PermissionError):  # reading record.json raises an error that names its owner
        return numbered
    for name in names:
        kind, _, number = name.partition("-")
        if kind in numbered and number.endswith(".json") and number[:-5].isdigit():
            numbered[kind].append(int(number[:-5]))
    return numbered


def _read_tasks(run: RunDirectory) -> dict[int, FolderFiles]:
    return {number: read_folder(run.task(number)) for number in run.task_numbers()}


def _read_start(directory: RunDirectory, number: int) -> StartFiles:
    folder = directory.start(number)
    return StartFiles(
        read_claim(directory, number), any((folder / name).exists() for name in ("end.json", "lost.json"))
    )


def _read_attempt(attempt: AttemptDirectory, *, with_step: bool) -> AttemptFiles:
    end = AttemptRecord.read(attempt)
    begun = StartRecord.read(attempt, end=end) if end is not None else StartRecord.read_file(attempt)
    beat = read_json_or_none(attempt.heartbeat) if with_step else None
    return AttemptFiles(attempt, begun, end, beat["step"] if beat is not None else None)


def _host_of(folder: FolderFiles, record: Mapping[str, Any], newest: Path, run: RunDirectory) -> str:
    """Return the host on which the process of a local run without a claim runs; "" for any other run."""
    job_id = folder.job_ids[-1] if folder.job_ids else ""
    if not job_id.startswith("local-") or folder.claims_of(job_id):
        return ""
    return str((record if newest == run.record else read_json(run.record))["host"])


def _array_claims(task: FolderFiles) -> list[tuple[int, str]]:
    claims = [(number, start.claim.job_id.partition("_")) for number, start in task.starts.items() if start.claim]
    return [(number, array) for number, (array, of_array, _) in claims if of_array]


def _array_of(record: Mapping[str, Any]) -> str:
    job = record["job"].get("job", {})
    return str(job.get("array", "")) if isinstance(job, dict) else ""


def _job_of(record: Mapping[str, Any], path: Path) -> RecordedJob:
    value = record["job"]
    try:
        if missing := [name for name in _TABLES if not isinstance(value[name], dict)]:
            raise TypeError(missing)
        components = [one["job"] for one in value.get("resolved_components") or []] or [value["job"]]
        least = [_least_nodes(one["nodes"]) for one in components]
        nodes = components[0]["nodes"] if len(components) == 1 else sum(least)
        full = sum(count * one["ranks_per_node"] for count, one in zip(least, components, strict=True))
        ranks = value["job"].get("ranks") or full
        scheduler, job = value["scheduler"], value["job"]
        ranks = 1 if job.get("once") else ranks
        texts = (
            value["site"]["name"], scheduler["kind"], scheduler.get("conf") or "", scheduler.get("cluster") or "",
            job.get("cluster") or "", job.get("array") or "",
        )  # fmt: skip
        if not all(isinstance(one, str) for one in texts) or not isinstance(ranks, int):
            raise TypeError(texts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged_record(path, record) from error
    site, kind, conf, site_cluster, cluster, array = texts
    return RecordedJob(site, RecordedScheduler(kind, conf, site_cluster), cluster, array, nodes, ranks)


def _least_nodes(nodes: int | str) -> int:
    return nodes if isinstance(nodes, int) else int(nodes.split("-")[0])


def damaged_record(path: Path, record: Mapping[str, Any]) -> DamagedFileError:
    """Return the error for a `record.json` or `resumed-SSS.json` that this version of toolkit cannot read."""
    return DamagedFileError(
        "another version of toolkit wrote this record, or it is damaged",
        where=str(path),
        fix=f"read the record with toolkit {record.get('toolkit', 'of its time')}, or submit the run's job.toml again",
    )
