"""Submit a script once, though sbatch may end without an answer: a token in the job's comment finds the job again.

sbatch says "Socket timed out on send/recv operation" both when slurmctld took the job and when it did not. So nothing
is sent a second time before the queue was asked for the token, twice with some time between: a request that waits in a
stopped slurmctld's socket is processed only after it resumes. If two jobs of one start ever exist, the
second one ends by itself, since a start is claimed once.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import NotFoundError, OwnFailureError, SchedulerRefusedError, ToolkitError
from toolkit.slurm.commands import NoAnswerError, Slurm
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.talk import say

PATIENCE_S = 120.0  # for all of it: sbatch, the questions and the pauses between them
SETTLE_S = 10.0  # between two answers "there is no such job" before it is sent again
QUESTION_S = 15.0  # for one question
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_SEPARATOR = "\x1f"
_JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
# Errors after which it is unknown whether Slurm accepted a request (slurm_errno.c, 22.05 to 24.11); the last one is what
# `scontrol requeue` makes of a time-out.
_UNSETTLED = (
    "timed out",
    "unable to contact slurm controller",
    "zero bytes",
    "connection reset",
    "unexpected message received",
)
# What a job's batch script and ranks are told of their job. sbatch hands its environment to the new job, where the
# old numbers would contradict the new ones ("SLURM_MEM_PER_CPU ... and SLURM_MEM_PER_NODE are mutually exclusive").
_OF_A_JOB = ("SLURM_", "SLURMD_", "PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "PALS_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
# These are a job's own only inside one; on a login node the user may have set them.
_OF_ITS_NODE = frozenset(
    {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL", "TMPDIR", "HOSTNAME"}
)  # fmt: skip


class UnsettledError(NoAnswerError):
    """Nobody knows whether Slurm took a job; its run must be kept."""


def token_of(run_id: str, start: int, part: int = 0) -> str:
    """The word that marks the job of one start of a run, the first word of its comment; of an array in several parts
    each has one.
    """
    return f"toolkit:{run_id}:{start}" + (f".{part}" if part else "")


def comment_of(token: str, options: Sequence[str]) -> str:
    """A job's whole comment: our token, then the words of the last `--comment` among sbatch's `options`."""
    given = last_value_of(options, "comment")
    return f"{token} {given}" if given else token


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what tells a process which job, step and rank it is."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_OF_A_JOB)}


def _for_another_job(environ: Mapping[str, str]) -> dict[str, str]:
    outer = _OF_ITS_NODE if "SLURM_JOB_ID" in environ else frozenset()
    return {name: value for name, value in without_job(environ).items() if name not in outer}


def is_unsettled(error: ToolkitError) -> bool:
    """True for a failure of sbatch or scontrol after which it is unknown whether Slurm accepted the request."""
    if isinstance(error, NoAnswerError | OwnFailureError):  # killed, by us or others, or an answer without an id
        return True
    return is_silence(error.message)


def is_silence(said: str) -> bool:
    """True of words of Slurm's commands that tell of a slurmctld which did not answer."""
    return any(words in said.lower() for words in _UNSETTLED)


def submit_once(
    slurm: Slurm, script: Path, comment: str, *, options: Sequence[str] = (), arguments: Sequence[str] = (),
    patience_s: float = PATIENCE_S, say: Callable[[str], object] = say, hint: str = "",
) -> str:  # fmt: skip
    """Submit `script` and return its job id; one job, whatever becomes of sbatch's answer.

    Args:
        comment: the job's comment; its first word is the token, which no other start of any run has.
        options: further options of sbatch; they win over the script's.
        arguments: the script's own.
        patience_s: after this many seconds without certainty it is given up.
        say: reports what the function waits for, by default on stderr.
        hint: an alternative to waiting, reported with it.

    Raises:
        SchedulerRefusedError: sbatch said no; there is no job.
        UnsettledError: Slurm stayed away; the job may come to be, and `find_by_token` finds it later.
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
            say(f"{error.message}; asking Slurm for the job by its comment {token}, for up to {left_s:.0f} s{hint}")
        job_id = _wait_for_answer(slurm, token, deadline)
        if job_id is not None:
            say(f"Slurm took it as job {job_id}")
            return job_id
        say("Slurm did not take it; submitting again")


def find_by_token(slurm: Slurm, token: str) -> str | None:
    """The id of the user's job whose comment begins with `token`; None where Slurm knows none.

    Ended jobs are found in squeue for `MinJobAge`, then with accounting that keeps comments
    (AccountingStoreFlags=job_comment). Of several, which Slurm ends but one, it is the oldest.

    Raises:
        SchedulerRefusedError, NotFoundError: Slurm does not answer.
    """
    layout = _SEPARATOR.join(("%F", "%k"))
    rows = slurm.call(["squeue", "--me", "--noheader", "--states=all", f"--format={layout}"])
    return _first_with(token, rows) or _first_with(token, _accounted(slurm))


def job_id_of(output: str) -> str:
    """The job id that `sbatch --parsable` printed; a site's banner may stand before it.

    Raises:
        OwnFailureError: there is none.
    """
    found = _JOB_ID.findall(output)
    if not found:
        raise OwnFailureError(
            f"sbatch printed no job id: {output.strip()!r}", fix="see `squeue --me` before you submit again"
        )
    return str(found[-1])


def _sbatch(slurm: Slurm, words: Sequence[str]) -> str:
    return job_id_of(slurm.call(["sbatch", "--parsable", *words], base=_for_another_job(os.environ)))


def _wait_for_answer(slurm: Slurm, token: str, deadline: float) -> str | None:
    """The job id; None once Slurm said twice, SETTLE_S apart, that there is no such job."""
    asking = replace(slurm, timeout_s=min(slurm.timeout_s, QUESTION_S), silences=None)
    absent_since: float | None = None
    pauses = list(_PAUSES_S)
    while True:
        try:
            job_id = find_by_token(asking, token)
        except (SchedulerRefusedError, NotFoundError) as error:  # a module or a file system may be away for a moment
            absent_since, last = None, error.message
        else:
            if job_id is not None:
                return job_id
            if absent_since is None:
                absent_since = time.monotonic()
            elif time.monotonic() - absent_since >= SETTLE_S:
                return None
            last = "Slurm knows no such job yet"
        pause_s = pauses.pop(0) if len(pauses) > 1 else pauses[0]
        if time.monotonic() + pause_s > deadline:
            raise UnsettledError(
                f"nobody knows whether Slurm took the job ({last})",
                where=token,
                fix="`scontrol ping` says whether Slurm is up; then `toolkit status RUN` asks again",
            )
        time.sleep(pause_s)


def _accounted(slurm: Slurm) -> str:
    try:
        return slurm.call(
            ["sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations", "--starttime=now-30days",
             "--format=JobID,Comment"]
        )  # fmt: skip
    except (SchedulerRefusedError, NotFoundError):  # no accounting on this cluster; squeue has answered
        return ""


def _first_with(token: str, rows: str) -> str | None:
    found = []
    for row in rows.split("\n"):
        job, separator, comment = row.partition(_SEPARATOR)
        number = job.partition("_")[0].strip()  # sacct's 12_3 is a task of 12
        if separator and number.isdigit() and comment.split()[:1] == [token]:
            found.append(int(number))
    return str(min(found)) if found else None
