"""Request the kernels of some steps of a running run, and merge the traces of all its ranks."""

import math
import time
from typing import Any

from toolkit.errors import CheckFailedError, NotFoundError
from toolkit.metrics.samples import ClockSample
from toolkit.metrics.step_profile import TRACE_FILE
from toolkit.metrics.trace import merge_traces
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import make_folder, read_json, write_json
from toolkit.rundir.layout import RunDirectory, rank_of
from toolkit.runs.requests.control import require_running
from toolkit.supervise.node_state import samples_in
from toolkit.supervise.rank_files import host_of
from toolkit.terminal.talk import say

__all__ = ["request_kernels", "trace_of"]

_NOTICE_S = 15.0  # until all ranks have noticed a request
_WAIT_S = 120.0  # besides the steps


def request_kernels(run: RunDirectory, steps: int) -> None:
    """Make the ranks record the kernels of the next steps, and wait for their files.

    Raises:
        CheckFailedError: the run is not running, or no rank has recorded kernels.
    """
    require_running(run, "so it cannot record kernels")
    attempt, last = run.last_attempt(), last_record(run.metrics / "train.jsonl")
    begun = StartRecord.read(attempt) if attempt is not None else None
    if attempt is None or begun is None or last is None:
        raise CheckFailedError(
            f"no step of run {run.run_id} is known", where=str(run.path),
            fix="request kernels of a job that uses toolkit's training loop, after its first step",
        )  # fmt: skip
    make_folder(attempt.kernels_request.parent)
    for path in attempt.kernels_request.parent.glob("rank-*.json"):  # of an earlier request
        path.unlink()
    first = last.step + math.ceil(_NOTICE_S / last.seconds)
    write_json(attempt.kernels_request, {"first_step": first, "steps": steps})
    say(f"recording the kernels of steps {first} to {first + steps - 1}")
    deadline, missing = time.monotonic() + _WAIT_S + _NOTICE_S + steps * last.seconds, set(range(begun.ranks))
    while missing and time.monotonic() < deadline and not attempt.exit_file.exists():
        time.sleep(0.5)
        missing = {rank for rank in missing if not attempt.kernels_file(rank).exists()}
    attempt.kernels_request.unlink(missing_ok=True)
    if len(missing) == begun.ranks:
        raise CheckFailedError(
            f"no rank of run {run.run_id} has recorded kernels", where=str(attempt.kernels_request.parent),
            fix=f"request steps before its last one, {last.steps}, and check `toolkit logs {run.run_id}`",
        )  # fmt: skip
    if missing:
        say(f"without the kernels of {len(missing)} of {begun.ranks} ranks, such as rank {min(missing)}")


def trace_of(run: RunDirectory) -> dict[str, Any]:
    """Return the merged trace of the profiled steps and the kernels of the newest attempt.

    Raises:
        NotFoundError: the run has neither.
        ToolkitError: a file is damaged.
    """
    attempt, path = run.last_attempt(), run.metrics / TRACE_FILE
    phases = read_json(path) if path.exists() else {}
    files = sorted(attempt.kernels_request.parent.glob("rank-*.json")) if attempt is not None else []
    if attempt is None or not (phases or files):
        raise NotFoundError(
            f"run {run.run_id} has no trace", where=str(path),
            fix="set train.profile_steps, or add --kernels STEPS while the run is active",
        )  # fmt: skip
    kernels = {rank_of(file): read_json(file) for file in files}
    clocks = {
        one.host: (one.offset_s, one.uncertainty_s)
        for state in attempt.windows.glob("rank-*.json") for one in samples_in(state) if isinstance(one, ClockSample)
    }  # fmt: skip
    return merge_traces(phases, kernels, {rank: host_of(attempt, rank) or "?" for rank in kernels}, clocks)
