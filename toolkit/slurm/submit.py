"""Submit a script exactly once, even if sbatch exits without a response: a token in the job comment identifies the job.

sbatch prints "Socket timed out on send/recv operation" whether or not slurmctld accepted the job. toolkit therefore
submits again only after two queries, some time apart, did not find the token: a stopped slurmctld processes a request in
its socket only after it continues. If there are two jobs all the same, only one can claim the start; the other exits.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import NotFoundError, OwnFailureError, SchedulerRefusedError, ToolkitError
from toolkit.slurm.commands import NoAnswerError, Slurm
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.terminal.talk import say

__all__ = [
    "PATIENCE_S", "SETTLE_S", "UnsettledError", "comment_of", "find_by_token", "is_silence", "is_unsettled",
    "submit_once", "token_of", "without_job",
]  # fmt: skip

PATIENCE_S = 120.0  # time for sbatch, all queries and the pauses between them
SETTLE_S = 10.0  # pause between two queries that do not find the job; then toolkit submits it again
QUESTION_S = 15.0  # the timeout of one query
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_SEPARATOR = "\x1f"
_JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
# Errors that do not show whether Slurm accepted a request (slurm_errno.c, 22.05 to 26.05); `scontrol requeue` prints the
# last one after a timeout.
_UNSETTLED = (
    "timed out", "unable to contact slurm controller", "zero bytes", "connection reset",
    "unexpected message received",
)  # fmt: skip
# Prefixes of variables that belong to the current job. sbatch would pass them to the new job, where they would contradict
# its own values ("SLURM_MEM_PER_CPU ... and SLURM_MEM_PER_NODE are mutually exclusive").
_OF_A_JOB = ("SLURM_", "SLURMD_", "PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "PALS_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
# Inside a job, Slurm sets these for the node; on a login node the user may have set them.
_OF_ITS_NODE = frozenset(
    {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL", "TMPDIR", "HOSTNAME"}
)  # fmt: skip


class UnsettledError(NoAnswerError):
    """It is unknown whether Slurm accepted a job, so the run directory must be kept."""


def token_of(run_id: str, start: int, part: int = 0) -> str:
    """Return the token of one start of a run, the prefix of the job comment; each part of an array has its own."""
    return f"toolkit:{run_id}:{start}" + (f".{part}" if part else "")


def comment_of(token: str, options: Sequence[str]) -> str:
    """Return the job comment: the token, followed by the last `--comment` among the sbatch `options`."""
    given = last_value_of(options, "comment")
    return f"{token} {given}" if given else token


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that identify a job, step or rank."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_OF_A_JOB)}


def _for_another_job(environ: Mapping[str, str]) -> dict[str, str]:
    outer = _OF_ITS_NODE if "SLURM_JOB_ID" in environ else frozenset()
    return {name: value for name, value in without_job(environ).items() if name not in outer}


def is_unsettled(error: ToolkitError) -> bool:
    """Return whether Slurm may have accepted the request despite this error of sbatch or scontrol."""
    if isinstance(error, NoAnswerError | OwnFailureError):  # the command was killed, or printed no job id
        return True
    return is_silence(error.message)


def is_silence(output: str) -> bool:
    """Return whether the output of a Slurm command reports that slurmctld did not respond."""
    return any(part in output.lower() for part in _UNSETTLED)


def submit_once(
    slurm: Slurm, script: Path, comment: str, *, options: Sequence[str] = (), arguments: Sequence[str] = (),
    patience_s: float = PATIENCE_S, say: Callable[[str], object] = say, hint: str = "",
) -> str:  # fmt: skip
    """Submit `script` as exactly one job, even if the response of sbatch is lost; return the job id.

    Args:
        comment: the job comment, which starts with the token of this start of this run.
        options: further sbatch options, which override those in the script.
        arguments: the arguments of the script.
        patience_s: the maximum time to determine whether Slurm accepted the job.
        say: reports what toolkit is waiting for, by default on stderr.
        hint: text to append to this report, for users who do not want to wait.

    Raises:
        SchedulerRefusedError: sbatch rejected the job, which does not exist.
        UnsettledError: Slurm did not respond; if the job exists, `find_by_token` can find it later.
        NotFoundError: sbatch is not on PATH.
    """
    token = comment.split()[0]
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _sbatch(slurm, [*options, f"--comment={comment}", str(script), *arguments])
        except NotFoundError:
            raise
        except (SchedulerRefusedError, OwnFailureError) as error:
            if not is_unsettled(error):
                raise
            left_s = max(0.0, deadline - time.monotonic())
            say(f"{error.message}; searching Slurm for the job by its comment {token}, for up to {left_s:.0f} s{hint}")
        job_id = _wait_for_answer(slurm, token, deadline)
        if job_id is not None:
            say(f"Slurm accepted the script as job {job_id}")
            return job_id
        say("Slurm did not accept the script; submitting it again")


def find_by_token(slurm: Slurm, token: str) -> str | None:
    """Return the id of the user's oldest job whose comment starts with `token`, or None; errors as in `Slurm.call`.

    squeue lists finished jobs for `MinJobAge`, sacct lists them if accounting stores comments
    (AccountingStoreFlags=job_comment).
    """
    layout = _SEPARATOR.join(("%F", "%k"))
    rows = slurm.call(["squeue", "--me", "--noheader", "--states=all", f"--format={layout}"])
    return _first_with(token, rows) or _first_with(token, _accounted(slurm))


def job_id_of(output: str) -> str:
    """Return the job id in the output of `sbatch --parsable`, after any banner; OwnFailureError if there is none."""
    job_ids = _JOB_ID.findall(output)
    if not job_ids:
        raise OwnFailureError(
            f"expected a job id from sbatch, got {output.strip()!r}", fix="check `squeue --me` before you submit again"
        )
    return str(job_ids[-1])


def _sbatch(slurm: Slurm, arguments: Sequence[str]) -> str:
    return job_id_of(slurm.call(["sbatch", "--parsable", *arguments], base=_for_another_job(os.environ)))


def _wait_for_answer(slurm: Slurm, token: str, deadline: float) -> str | None:
    """Wait for the job to appear and return its id; None if two queries, SETTLE_S apart, did not find it."""
    asking = replace(slurm, timeout_s=min(slurm.timeout_s, QUESTION_S), silences=None)
    absent_since: float | None = None
    pauses = list(_PAUSES_S)
    while True:
        try:
            job_id = find_by_token(asking, token)
        except (
            SchedulerRefusedError,
            NotFoundError,
        ) as error:  # a module or a file system may be unavailable for a moment
            absent_since, last = None, error.message
        else:
            if job_id is not None:
                return job_id
            if absent_since is None:
                absent_since = time.monotonic()
            elif time.monotonic() - absent_since >= SETTLE_S:
                return None
            last = "Slurm does not list the job yet"
        pause_s = pauses.pop(0) if len(pauses) > 1 else pauses[0]
        if time.monotonic() + pause_s > deadline:
            raise UnsettledError(
                f"cannot determine whether Slurm accepted the job ({last})",
                where=token,
                fix="`scontrol ping` shows whether Slurm is up; then `toolkit status RUN` checks again",
            )
        time.sleep(pause_s)


def _accounted(slurm: Slurm) -> str:
    try:
        return slurm.call(
            ["sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations", "--starttime=now-30days",
             "--format=JobID,Comment"]
        )  # fmt: skip
    except (SchedulerRefusedError, NotFoundError):  # without accounting, the output of squeue must suffice
        return ""


def _first_with(token: str, rows: str) -> str | None:
    numbers = []
    for row in rows.split("\n"):
        job, separator, comment = row.partition(_SEPARATOR)
        number = job.partition("_")[0].strip()  # sacct prints tasks as 12_3
        if separator and number.isdigit() and comment.split()[:1] == [token]:
            numbers.append(int(number))
    return str(min(numbers)) if numbers else None
