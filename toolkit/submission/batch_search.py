"""Find the largest micro-batch that fits into memory, by short runs of the job itself.

A trial is a run of its own, with all ranks and with the update of the optimizer: it may end by a failed allocation, or be
killed for its memory, without ending the search, and it fails if any rank fails.
"""

import io
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.amend import amend_job
from toolkit.config.found_micro_batch import layout_of
from toolkit.config.request import site_of_record
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import fitting_micro_batch
from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.metrics.training import read_train_log
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.submission.create import make_run
from toolkit.submission.run_here import follow_here
from toolkit.supervise.symptoms import GPU_OUT_OF_MEMORY, KILLED, OUT_OF_MEMORY

__all__ = ["HEADROOM", "NOTHING_FITS", "BatchSearch", "Trial", "run_start", "search_batch", "settings_of_trial"]

HEADROOM = 0.1
NOTHING_FITS = "use train.recompute, train.offload or parallel.shard"
_STEPS = 4  # the second one is the first with all memory in use
_STEPS_AT_THE_LIMIT = 16  # a heap still grows by fragmentation after the first steps
EXIT_CODE_OF_TERM = 143
_OF_MEMORY = (OUT_OF_MEMORY.word, GPU_OUT_OF_MEMORY.word, KILLED.word)


@dataclass(frozen=True)
class Trial:
    """A micro-batch size that was tried on all ranks."""

    micro_batch: int
    steps: int
    fits: bool
    samples_per_s: float | None  # over all ranks, if it fits
    reason: str  # why it does not fit

    def __str__(self) -> str:
        reason = self.reason if len(self.reason) <= 160 else f"{self.reason[:160]} ..."
        result = f"fits, about {self.samples_per_s:g} samples/s" if self.fits else f"does not fit: {reason}"
        return f"micro_batch {self.micro_batch}, {self.steps} steps: {result}"


@dataclass(frozen=True)
class BatchSearch:
    """The result of a search.

    largest: the largest size that fits; 0 if not even one sample does.
    micro_batch: the proposal: at most `largest` less the headroom, and a divisor of the samples of a rank; 0 if none.
    accumulation: micro-batches of this size per step, for the global batch `batch` on `data_ranks`.
    is_limited: whether no larger size failed, because the search was not allowed to try one.
    """

    largest: int
    micro_batch: int
    accumulation: int
    batch: int
    data_ranks: int
    headroom: float
    is_limited: bool
    trials: tuple[Trial, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def search_batch(
    job: ResolvedJob, runs: Path, *, headroom: float, most: int | None, report: Callable[[Trial], object]
) -> BatchSearch:
    """Search on this machine, or in the allocation of this process.

    Args:
        runs: the folder for the runs of the trials.
        headroom: share of the largest size that the proposal leaves free, for fragmentation.
        most: the largest size to try; None is the number of samples of a rank per step.
        report: called after each trial.

    Raises:
        ToolkitError: a trial failed for another reason than memory.
    """
    data_ranks = _data_ranks(job)
    share = job.train.batch // data_ranks
    trials: dict[tuple[int, int], Trial] = {}

    def fits(size: int, steps: int) -> bool:
        if (size, steps) not in trials:
            trials[size, steps] = _tried(job, runs, size, share, data_ranks, steps)
            report(trials[size, steps])
        return trials[size, steps].fits

    limit = most or share
    largest = _largest(partial(fits, steps=_STEPS), limit)
    largest = _largest_below(partial(fits, steps=_STEPS_AT_THE_LIMIT), largest)
    allowed = int(largest * (1 - headroom)) if largest < limit else limit
    proposed = max((size for size in range(1, max(1, allowed) + 1) if _divides(job, share, size)), default=0)
    micro_batch = proposed if largest else 0
    accumulation = share // micro_batch if micro_batch else 0
    tried = tuple(trials[key] for key in sorted(trials))
    return BatchSearch(
        largest, micro_batch, accumulation, job.train.batch, data_ranks, headroom, largest == limit, tried
    )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest size up to `limit` that fits: doubling sizes first, then bisection; 0 if none fits."""
    low, high = 0, limit + 1  # `low` fits, `high` does not, or must not be tried
    for size in _doubling(limit):
        if not fits(size):
            high = size
            break
        low = size
    return _bisected(fits, low, high)


def _largest_below(fits: Callable[[int], bool], largest: int) -> int:
    """Return `largest` if it fits, or the next smaller size that does: steps of doubling length, then bisection."""
    low, high, distance = largest, largest + 1, 1
    while low and not fits(low):
        low, high, distance = max(0, low - distance), low, 2 * distance
    return _bisected(fits, low, high)


def _bisected(fits: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _doubling(limit: int) -> Iterator[int]:
    size = 1
    while size < limit:
        yield size
        size *= 2
    yield limit


def _divides(job: ResolvedJob, share: int, size: int) -> bool:
    return fitting_micro_batch(job.parallel, share, size) == size


def _data_ranks(job: ResolvedJob) -> int:
    mesh = job.parallel
    return max(job.rank_counts) // (mesh.pp * mesh.cp * mesh.tp)


def _tried(job: ResolvedJob, runs: Path, size: int, share: int, data_ranks: int, steps: int) -> Trial:
    # Gradients of an earlier pass are in memory beside the activations of a later one.
    passes = job.parallel.pp * job.parallel.stages_per_rank if job.parallel.pp > 1 else 2 if size < share else 1
    chosen = {"train.micro_batch": size, "train.batch": size * passes * data_ranks}
    settings = settings_of_trial(steps, chosen)
    trial = amend_job(job, site=site_of_record(job), settings=settings)
    silent = {name: type(getattr(trial, name))() for name in ("notify", "alerts")}  # a trial is expected to fail
    trial = trial.model_copy(update=silent)
    run = make_run(trial, runs, here=True)
    with redirect_stderr(io.StringIO()):  # the logs are in the run directory, and a failure is a result
        code = follow_here(run, trial, 0, str, str)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # of the last step: as large as the state of the job
    if run.is_asked("stop") or run.is_asked("cancel"):  # Ctrl-C or TERM ends the search, not only this trial
        sys.exit(code or EXIT_CODE_OF_TERM)
    if code == 0:
        log = run.metrics / "train.jsonl"
        seconds = [record.seconds for record in read_train_log(log)][1:] if log.exists() else []
        if not seconds:
            message = "the job has recorded no steps in metrics/train.jsonl, so its batch size means nothing here"
            fix = "pass a job that trains with toolkit.train.loop, such as train_lm"
            raise ToolkitError(message, where=str(run.path), fix=fix)
        return Trial(size, steps, True, round(trial.train.batch / statistics.median(seconds), 2), "")
    end = _end_of(run)
    if end is None or end.symptom not in _OF_MEMORY:
        raise ToolkitError(
            f"a trial with micro_batch = {size} failed: {end.reason if end else 'no attempt has ended'}",
            where=str(run.path),
            fix=f"`toolkit explain {run.path}` states why",
        )
    return Trial(size, steps, False, None, end.reason)


def run_start(
    run: RunDirectory, job: ResolvedJob, start: int, write: Callable[[str], object], report: Callable[[str], object]
) -> int:
    """Run one start in the foreground, after a search if its micro-batch is "auto"; return the exit code.

    Ctrl-C or SIGTERM in the search removes a run that has not started: there is nothing to resume.
    """
    try:
        _settle_micro_batch(run, job, report)
    except (KeyboardInterrupt, SystemExit):
        if start == 0:
            shutil.rmtree(run.path)
            report(f"search interrupted; removed run {run.run_id}, which had not started")
        raise
    return follow_here(run, job, start, write, report)


def _settle_micro_batch(run: RunDirectory, job: ResolvedJob, report: Callable[[str], object]) -> None:
    """Find the size for `train.micro_batch = "auto"`, unless the run has one for this layout; report which it is.

    The trials are runs in the folder of the run, which remain only after an error.
    """
    if not job.train.is_auto:
        return
    known, layout = read_json_or_none(run.micro_batch), layout_of(job)
    if known is not None and known["layout"] == layout:
        report(f"train.micro_batch = {known['micro_batch']}, found for this layout at {known['time']}")
        return
    changed = ", ".join(name for name in layout if known is not None and known["layout"].get(name) != layout[name])
    report(f"finding train.micro_batch{f' again: changed {changed}' if changed else ''}")
    trials = run.path / "trials"
    found = search_batch(job, trials, headroom=HEADROOM, most=None, report=lambda one: report(f"  {one}"))
    if not found.micro_batch:
        raise CheckFailedError("not even one sample per rank fits into memory", where=str(trials), fix=NOTHING_FITS)
    write_json(run.micro_batch, {"micro_batch": found.micro_batch, "time": utc_now(), "layout": layout})
    shutil.rmtree(trials, ignore_errors=True)  # NFS keeps files that a process has still open
    report(f"train.micro_batch = {found.micro_batch}, found by {len(found.trials)} trials")


def settings_of_trial(steps: int, chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings for a run of a few steps that saves and validates nothing and never restarts, and those `chosen`."""
    values = {
        "train.steps": steps, "train.validate_every": 0, "train.early_stop_patience": 0, "train.early_stop_min_delta": 0.0,
        "train.guard": '"off"', "train.guard_deviations": 8.0, "train.guard_window": 64, "train.guard_limit": 10,
        "train.profile_steps": 0, "train.profile_from": 10, "train.lr_scaling": '"none"', "train.lr_reference_batch": 0,
        "checkpoint.every_steps": steps + 1, "checkpoint.every_s": 0, "checkpoint.best": '""', "checkpoint.best_every_steps": 100,
        "checkpoint.best_mode": '"min"', "checkpoint.keep_best": 0, "checkpoint.source": '""', "restart.crashes": 0,
        "restart.out_of_memory": '"crash"', **chosen,
    }  # fmt: skip
    return tuple(f"{name}={value}" for name, value in values.items())


def _end_of(run: RunDirectory) -> AttemptRecord | None:
    attempt = run.last_attempt()
    return AttemptRecord.read(attempt) if attempt is not None else None
