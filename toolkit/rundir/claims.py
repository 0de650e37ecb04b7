"""Claims: each start and each attempt belongs to exactly one supervisor, the one that creates its folder."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import make_folder, read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory


@dataclass(frozen=True)
class StartClaim:
    """The owner of a start. `process_started` is the kernel's start time of `pid`, in clock ticks since boot."""

    start: int
    job_id: str
    host: str
    pid: int
    process_started: int
    claimed: str = ""


_CLAIM_KEYS = [one.name for one in fields(StartClaim)]


def claim_start(run: RunDirectory, *, first: int, job_id: str, host: str, pid: int, process_started: int) -> StartClaim:
    """Claim a start for a script whose first start is `first`.

    A requeue runs the same script again under the same job id and takes the next number.

    Raises:
        OwnFailureError: another job has run this script, a later script has started before this one, the run was since
        resumed as another job, or the last start, of another job, has not ended.
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
            f"start {first} is too late: start {last} of this run started before it",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` continues the run",
        )
    # Numbers may have gaps: a start that was submitted and cancelled in the queue is never claimed.
    if last >= 0 and not _ended(run, last) and _claim(run, last).job_id != job_id:
        raise OwnFailureError(
            f"start {last} of this run (job {_claim(run, last).job_id}) has not ended",
            where=str(run.path),
            fix=f"`toolkit cancel {run.run_id}` first, or wait for it",
        )
    claim = StartClaim(number, job_id, host, pid, process_started, utc_now())
    _put(run, claim)
    return claim


def _refuse_resumed(run: RunDirectory, job_id: str, numbers: Sequence[int]) -> None:
    """Reject a requeue of a job whose run was since resumed: it would continue with the old job file."""
    newest = max(number for number in numbers if _claim(run, number).job_id == job_id)
    later = [number for number in run.resumed_starts() if number > newest]
    if later:
        raise OwnFailureError(
            f"this requeue of job {job_id} is too late: the run has since been resumed as start {later[-1]}",
            where=str(run.path),
            fix=f"`toolkit resume {run.run_id}` continues the run",
        )


def _put(run: RunDirectory, claim: StartClaim) -> None:
    """Make the start's folder with the claim inside it in one step, so that a kill never leaves a start without a claim."""
    draft = run.starts / f".{claim.start:03}.{claim.host}.{claim.pid}"
    make_folder(draft)
    write_json(draft / "claim.json", asdict(claim))
    try:
        draft.rename(run.start(claim.start))  # fails if a folder with a claim exists
    except OSError as error:
        shutil.rmtree(draft)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise OwnFailureError(
            f"start {claim.start} was just claimed by another supervisor",
            where=str(run.path),
            fix=f"`toolkit status {run.run_id}` shows the job that has it",
        ) from None


class SupersededError(OwnFailureError):
    """A later start has the run: the supervisor of an earlier one must not touch it any more."""


def refuse_superseded(run: RunDirectory, start: int) -> None:
    """Check that no later start has the run: Slurm may start one while this supervisor still runs on a cut-off node.

    Raises:
        SupersededError: a later start was claimed.
    """
    newest = max(run.start_numbers(), default=start)
    if newest > start:
        raise SupersededError(f"start {newest} has this run now; start {start} was abandoned", where=str(run.path))


def end_start(run: RunDirectory, number: int, *, state: str, exit_code: int) -> None:
    """Record that a start has ended; the next one may be claimed."""
    write_json(run.start(number) / "end.json", {"state": state, "exit_code": exit_code, "time": utc_now()})


def read_claim(run: RunDirectory, number: int) -> StartClaim | None:
    """The claim of a start, in `end.json` if its task is done; None if the start is not claimed."""
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


def _ended(run: RunDirectory, number: int) -> bool:
    return any((run.start(number) / name).exists() for name in ("end.json", "lost.json"))


def claim_attempt(run: RunDirectory) -> AttemptDirectory:
    """Claim the next attempt number, and stop writes of older attempts.

    Every older `.part-*` folder of a checkpoint is renamed, so that a commit (a rename of that folder) by ranks of an
    abandoned attempt fails. The checkpointer deletes the new names when it starts.
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
        with suppress(FileNotFoundError):  # its last rank has just committed it: it is a checkpoint now
            part.rename(_stale_name(part))
    return attempt


def _stale_name(part: Path) -> Path:
    """`step-X.part-A-N` as the free name `step-X.stale-A`, or `step-X.stale-A-2` and so on."""
    step, _, suffix = part.name.rpartition(".part-")
    name = f"{step}.stale-{suffix.partition('-')[0]}"
    stale, count = part.with_name(name), 2
    while stale.exists():
        stale = part.with_name(f"{name}-{count}")
        count += 1
    return stale


def stale_parts(checkpoints: Path, attempt: int) -> list[Path]:
    """Unfinished saves of attempts before `attempt`."""
    parts = []
    for path in sorted(checkpoints.glob("step-*.part-*")):
        owner = path.name.rpartition(".part-")[2].partition("-")[0]
        if owner.isdigit() and int(owner) < attempt:
            parts.append(path)
    return parts
