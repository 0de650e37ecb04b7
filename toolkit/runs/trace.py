"""Request the kernels of some steps of a running run, and merge the traces of all its ranks."""

import math
import time
from typing import Any

from toolkit.errors import CheckFailedError, NotFoundError, counted
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

NOTICE_S, _WAIT_S = 15.0, 120.0  # until all ranks have noticed a request; for their files, besides the steps


def request_kernels(run: RunDirectory, steps: int) -> None:
    """Make the ranks record the kernels of the next steps, and wait for their files.

    Raises:
        CheckFailedError: the run is not running, or no rank has recorded kernels.
    """
    require_running(run, "so it cannot record kernels")
    attempt, last = run.last_attempt(), last_record(run.metrics / "train.jsonl")
    begun = StartRecord.read(attempt) if attempt is not None else None
    done, ranks = 0, begun.ranks if begun is not None else 0
    if attempt is not None and last is not None:
        make_folder(attempt.kernels)
        for path in attempt.kernels.glob("rank-*.json"):  # of an earlier request
            path.unlink()
        first = last.step + math.ceil(NOTICE_S / last.seconds)
        write_json(attempt.kernels / "request.json", {"first_step": first, "steps": steps})
        say(f"recording the kernels of {counted(steps, 'step')} from step {first} on")
        deadline = time.monotonic() + _WAIT_S + NOTICE_S + steps * last.seconds
        while done < ranks and time.monotonic() < deadline and not attempt.exit_file.exists():
            time.sleep(0.5)
            done = sum(1 for _ in attempt.kernels.glob("rank-*.json"))
        (attempt.kernels / "request.json").unlink(missing_ok=True)
    if not done:
        raise CheckFailedError(
            f"no rank of run {run.run_id} has recorded kernels", where=str(run.path),
            fix="request them of a job with toolkit's training loop, after its first step and before its last one",
        )  # fmt: skip
    if done < ranks:
        say(f"only {done} of {ranks} ranks recorded kernels")


def trace_of(run: RunDirectory) -> dict[str, Any]:
    """Return the merged trace of the profiled steps, and of the kernels of the newest attempt.

    Raises:
        NotFoundError: the run has neither.
        ToolkitError: a file is damaged.
    """
    attempt, path = run.last_attempt(), run.metrics / TRACE_FILE
    traces = {"": read_json(path)} if path.exists() else {}
    if attempt is not None:
        for kernels in sorted(attempt.kernels.glob("rank-*.json")):
            traces[f"rank {rank_of(kernels)} on {host_of(attempt, rank_of(kernels))}"] = read_json(kernels)
    if attempt is None or not traces:
        fix = "set train.profile_steps, or add --kernels STEPS while the run is active"
        raise NotFoundError(f"run {run.run_id} has no trace", where=str(path), fix=fix)
    samples = [sample for state in attempt.windows.glob("rank-*.json") for sample in samples_in(state)]
    clocks = {one.host: (one.offset_s, one.uncertainty_s) for one in samples if isinstance(one, ClockSample)}
    return merge_traces(traces, clocks)
