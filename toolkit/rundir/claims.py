"""Records the jobs of a run: which job each start was submitted as, and which supervisor claimed a start or attempt.

Large arrays are submitted as several Slurm arrays, which are called *parts* here. `layout` explains starts.
"""

import errno
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import make_folder, read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory, start_of

__all__ = [
    "Part", "StartClaim", "SupersededError", "all_parts", "claim_attempt", "claim_start", "end_start",
    "newest_parts", "open_submission", "parts_in", "process_start_ticks", "read_claim", "refuse_superseded",
    "slurm_id", "start_has_ended", "task_of", "write_submission",
]  # fmt: skip


@dataclass(frozen=True)
class StartClaim:
    """The supervisor that owns a start. `process_started` is the start time of `pid`, in clock ticks since boot."""

    start: int
    job_id: str
    host: str
    pid: int
    process_started: int
    claimed: str = ""


_CLAIM_KEYS = [one.name for one in fields(StartClaim)]


def claim_start(run: RunDirectory, *, first: int, job_id: str, host: str, pid: int, process_started: int) -> StartClaim:
    """Claim a start for a script whose first start is `first`.

    A requeue executes the same script again under the same job id, and claims the next free number.

    Raises:
        OwnFailureError: another job owns the start `first`, a later script has already started, the run has since been
        resumed as another job, or the last start belongs to another job and has not ended.
    """
    numbers = run.start_numbers()
    last = numbers[-1] if numbers else -1
    number = first
    if first in numbers:
        owner = _claim(run, first)
        if owner.job_id != job_id:
            raise OwnFailureError(
                f"start {first} of this run belongs to job {owner.job_id}, but this is job {job_id}",
                where=str(run.path),
                fix=f"`toolkit resume {run.run_id}` continues the run",
            )
        _refuse_resumed(run, job_id, numbers)
        number = last + 1
    elif first < last:
        raise OwnFailureError(
            f"start {first} is too late: start {last} of this run has already started",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` continues the run",
        )
    # Numbers may have gaps, because a start that was cancelled while it was pending is never claimed.
    if last >= 0 and not start_has_ended(run, last) and _claim(run, last).job_id != job_id:
        raise OwnFailureError(
            f"start {last} of this run (job {_claim(run, last).job_id}) has not ended",
            where=str(run.path),
            fix=f"run `toolkit cancel {run.run_id}` first, or wait until it has ended",
        )
    claim = StartClaim(number, job_id, host, pid, process_started, utc_now())
    _put(run, claim)
    return claim


def _refuse_resumed(run: RunDirectory, job_id: str, numbers: Sequence[int]) -> None:
    """Reject a requeue of a job if the run has since been resumed: the requeue would use the old job file."""
    newest = max(number for number in numbers if _claim(run, number).job_id == job_id)
    later = [number for number in run.resumed_starts() if number > newest]
    if later:
        raise OwnFailureError(
            f"this requeue of job {job_id} is too late: the run has since been resumed as start {later[-1]}",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` continues the run",
        )


def _put(run: RunDirectory, claim: StartClaim) -> None:
    """Make the folder of a start atomically with the claim in it, so that a kill leaves no start without a claim."""
    draft = run.starts / f".{claim.start:03}.{claim.host}.{claim.pid}"
    make_folder(draft)
    write_json(draft / "claim.json", asdict(claim))
    try:
        draft.rename(run.start(claim.start))  # this fails if a folder with a claim exists
    except OSError as error:
        shutil.rmtree(draft)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise OwnFailureError(
            f"start {claim.start} was just claimed by another supervisor",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id}` shows the job that owns this start",
        ) from None


class SupersededError(OwnFailureError):
    """A later start owns the run, so the supervisor of an earlier start must no longer change it."""


def refuse_superseded(run: RunDirectory, start: int) -> None:
    """Check that no later start owns the run. Slurm may requeue a job while its old supervisor runs on a cut-off node.

    Raises:
        SupersededError: a later start was claimed.
    """
    newest = max(run.start_numbers(), default=start)
    if newest > start:
        raise SupersededError(f"start {newest} owns this run now; start {start} was abandoned", where=str(run.path))


def end_start(run: RunDirectory, number: int, *, state: str, exit_code: int) -> None:
    """Record that a start has ended, so that the next one may be claimed."""
    write_json(run.start(number) / "end.json", {"state": state, "exit_code": exit_code, "time": utc_now()})


def read_claim(run: RunDirectory, number: int) -> StartClaim | None:
    """Read the claim of a start, from `end.json` if its array task is finished; None if the start is not claimed."""
    value = read_json_or_none(run.start(number) / "claim.json")
    if value is None:
        end = read_json_or_none(run.start(number) / "end.json")
        value = end if end is not None and "pid" in end else None
    return StartClaim(**{name: value[name] for name in _CLAIM_KEYS if name in value}) if value else None


def _claim(run: RunDirectory, number: int) -> StartClaim:
    claim = read_claim(run, number)
    if claim is None:
        raise OwnFailureError(
            f"claim.json of start {number} not found",
            where=str(run.start(number)),
            fix=f"submit {run.job_file} as a new run",
        )
    return claim


def start_has_ended(run: RunDirectory, number: int) -> bool:
    """Return whether the supervisor of this start has recorded its end, or a later one that it was lost."""
    return any((run.start(number) / name).exists() for name in ("end.json", "lost.json"))


def claim_attempt(run: RunDirectory) -> AttemptDirectory:
    """Claim the next attempt number, and prevent older attempts from committing checkpoints.

    It renames the `.part-*` folders of older attempts. If their ranks still run, they cannot commit, because a commit
    renames that folder. The checkpointer of the new attempt deletes the renamed folders.
    """
    numbers = run.attempt_numbers()
    number = numbers[-1] + 1 if numbers else 0
    while True:
        attempt = run.attempt(number)
        try:
            make_folder(attempt.path)
            break
        except FileExistsError:
            number += 1
    attempt.make_folders()
    if number:
        run.revived_marker.touch(mode=0o600)
    for part in stale_parts(run.checkpoints, number):
        with suppress(FileNotFoundError):  # its ranks have just committed it, so it is a checkpoint now
            part.rename(_stale_name(part))
    return attempt


def _stale_name(part: Path) -> Path:
    """Return the first unused name of `step-X.stale-A`, `step-X.stale-A-2` etc. for a folder `step-X.part-A-N`."""
    step, _, suffix = part.name.rpartition(".part-")
    name = f"{step}.stale-{suffix.partition('-')[0]}"
    stale, count = part.with_name(name), 2
    while stale.exists():
        stale = part.with_name(f"{name}-{count}")
        count += 1
    return stale


def stale_parts(checkpoints: Path, attempt: int) -> list[Path]:
    """Return the folders of unfinished saves of attempts before `attempt`."""
    parts = []
    for path in sorted(checkpoints.glob("step-*.part-*")):
        owner = path.name.rpartition(".part-")[2].partition("-")[0]
        if owner.isdigit() and int(owner) < attempt:
            parts.append(path)
    return parts


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot (proc(5), stat field 22), to detect a reused pid.

    Raises:
        ProcessLookupError: the process does not exist, or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has exited")
    return int(fields[19])


@dataclass(frozen=True)
class Part:
    """The tasks `first` to `last` of a run, which the Slurm array `job_id` numbers from 0."""

    job_id: str
    first: int
    last: int

    def __contains__(self, task: int) -> bool:
        return self.first <= task <= self.last


def record_of_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the parts as recorded in `submitted-SSS.json`; {} for an array that is one Slurm array."""
    return {"parts": [asdict(part) for part in parts]} if parts else {}


def parts_in(record: Mapping[str, Any]) -> list[Part]:
    """Return the parts in `submitted-SSS.json` or `submitting-SSS.json`; [] for an array that is one Slurm array."""
    return [Part(str(one["job_id"]), int(one["first"]), int(one["last"])) for one in record.get("parts", [])]


def newest_parts(run: RunDirectory) -> list[Part]:
    """Return the parts of the newest submission of a run; [] if it is one Slurm array or a single job."""
    newest = max(run.whole.path.glob("submitted-*.json"), key=start_of, default=None)
    return parts_in((read_json_or_none(newest) or {}) if newest is not None else {})


def all_parts(run: RunDirectory) -> list[Part]:
    """Return the parts of every submission of a run."""
    records = (read_json_or_none(path) or {} for path in run.whole.path.glob("submitted-*.json"))
    return [part for record in records for part in parts_in(record)]


def slurm_id(parts: Sequence[Part], array_job: str, task: int) -> str:
    """Return the id that Slurm uses for a task."""
    part = next((part for part in parts if task in part), None)
    return f"{part.job_id}_{task - part.first}" if part is not None else f"{array_job}_{task}"


def task_of(parts: Sequence[Part], array_job: str, number: int) -> int:
    """Return the number that toolkit uses for the task that Slurm calls `ARRAY_JOB_NUMBER`."""
    return next((part.first + number for part in parts if part.job_id == array_job), number)


def write_submission(run: RunDirectory, start: int, job_id: str, parts: Sequence[Part] = ()) -> None:
    """Record in `submitted-SSS.json` the job id of a start of a run or task: a Slurm job, or a process of this host.

    `parts` are the parts of an array that was submitted in several parts.
    """
    record = {"job_id": job_id, "start": start, "time": utc_now(), **record_of_parts(parts)}
    write_json(run.submitted(start), record)


def open_submission(
    run: RunDirectory, start: int, token: str, *, process_started: int, parts: Sequence[Part] = ()
) -> Path:
    """Record that this process is about to call sbatch for a start. Returns the file, to be removed after the response.

    `process_started` is the start time of this process, in clock ticks since boot; `parts` are the planned parts of an
    array, without job ids.
    """
    path = run.submitting(start)
    record = {
        "start": start, "token": token, "host": socket.gethostname(), "pid": os.getpid(),
        "process_started": process_started, "time": utc_now(), **record_of_parts(parts),
    }  # fmt: skip
    write_json(path, record)
    return path
