"""Claims: each start and each attempt belongs to exactly one supervisor. `mkdir` decides who it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import OwnFailureError
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory


@dataclass(frozen=True)
class StartClaim:
    """Who lives this start. `process_started` is the kernel's start time of `pid`, in clock ticks since boot."""

    start: int
    job_id: str
    host: str
    pid: int
    process_started: int
    claimed: str = ""


def claim_start(
    run: RunDirectory, *, first: int, job_id: str, host: str, pid: int, process_started: int
) -> StartClaim:
    """Claim the start that a script whose first start is `first` may live.

    A requeue runs the same script again under the same job id and takes the next number. The same script under
    another job id is refused, and so is a later script while the start before it has not ended.
    """
    numbers = run.start_numbers()
    number = first
    if first in numbers:
        owner = _claim(run, first)
        if owner.job_id != job_id:
            raise OwnFailureError(
                f"start {first} of this run belongs to job {owner.job_id}, this is job {job_id}",
                where=str(run.path),
                fix=f"`toolkit resume {run.run_id}` continues the run, `toolkit rerun` starts a new one",
            )
        number = numbers[-1] + 1
    previous = number - 1
    if previous >= 0 and not _ended(run, previous) and _claim(run, previous).job_id != job_id:
        raise OwnFailureError(
            f"start {previous} of this run (job {_claim(run, previous).job_id}) has not ended",
            where=str(run.path),
            fix=f"`toolkit cancel {run.run_id}` first, or wait for it",
        )
    claim = StartClaim(number, job_id, host, pid, process_started, utc_now())
    try:
        run.start(number).mkdir()
    except FileExistsError:
        raise OwnFailureError(
            f"start {number} was claimed by another supervisor a moment ago", where=str(run.path)
        ) from None
    write_json(run.start(number) / "claim.json", asdict(claim))
    return claim


def end_start(run: RunDirectory, number: int, *, state: str, exit_code: int) -> None:
    """Record that a start has ended; the next one may be claimed."""
    write_json(run.start(number) / "end.json", {"state": state, "exit_code": exit_code, "time": utc_now()})


def read_claim(run: RunDirectory, number: int) -> StartClaim | None:
    """The claim of a start; None while it is being written."""
    value = read_json_or_none(run.start(number) / "claim.json")
    return StartClaim(**value) if value else None


def _claim(run: RunDirectory, number: int) -> StartClaim:
    claim = read_claim(run, number)
    if claim is None:
        raise OwnFailureError(f"start {number} has no claim.json", where=str(run.start(number)))
    return claim


def _ended(run: RunDirectory, number: int) -> bool:
    return any((run.start(number) / name).exists() for name in ("end.json", "lost.json"))


def claim_attempt(run: RunDirectory) -> AttemptDirectory:
    """Claim the next attempt number and fence off what older attempts may still be writing.

    Every older `.part-*` folder of a checkpoint is renamed aside, so that a commit (a rename of that folder) by
    ranks that were given up on fails.
    """
    numbers = run.attempt_numbers()
    number = numbers[-1] + 1 if numbers else 0
    while True:
        attempt = run.attempt(number)
        try:
            attempt.path.mkdir()
            break
        except FileExistsError:
            number += 1
    attempt.make_folders()
    for part in stale_parts(run.checkpoints, number):
        part.rename(part.with_name(f"{part.name}.fenced-{number:03}"))
    return attempt


def stale_parts(checkpoints: Path, attempt: int) -> list[Path]:
    """Unfinished saves of attempts before `attempt`."""
    parts = []
    for path in sorted(checkpoints.glob("step-*.part-*")):
        suffix = path.name.rpartition(".part-")[2]
        if suffix.isdigit() and int(suffix) < attempt:
            parts.append(path)
    return parts
