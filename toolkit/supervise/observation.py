"""Judge a running attempt: read what its nodes recorded, and write `metrics/verdicts.jsonl`. The supervisor does this."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.detectors.disk import disk_sample
from toolkit.metrics.judge import Detectors
from toolkit.metrics.own import MeanLog
from toolkit.metrics.records import RecordTail
from toolkit.metrics.samples import DiskSample, LossSample, Sample
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Verdict, VerdictKind, VerdictLog, line_of_verdict
from toolkit.metrics.window_file import WindowReader
from toolkit.metrics.windows import Window
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.user_requests import move_requests
from toolkit.supervise.alerting import Alerting
from toolkit.supervise.log import say
from toolkit.supervise.node_state import samples_in
from toolkit.supervise.stacks import Culprit

__all__ = ["Observation"]

PERIOD_S = 10.0
QUOTA_PERIOD_S = 300.0
LONGEST_SAVE_S = 1800.0  # a save that adds no file for this time is not a pause
JOIN_S = 5.0


@dataclass
class Observation:
    """Judges one attempt every `PERIOD_S`, in a thread. It never ends the attempt: what it cannot read is logged once.

    `left_s` returns the seconds until the allocation ends. `alerting` evaluates the rules of alerts. `culprit` collects the
    stacks of the ranks, and returns who stalls them. `means` gets the windows of all ranks.
    """

    attempt: AttemptDirectory
    left_s: Callable[[], float]
    alerting: Alerting | None = None
    culprit: Callable[[], Culprit] | None = None
    means: MeanLog | None = None
    _readers: dict[Path, WindowReader] = field(default_factory=dict)
    _states: dict[Path, int] = field(default_factory=dict)
    _peers: dict[int, int] = field(default_factory=dict)  # the pipeline stage of each rank
    _train: RecordTail[TrainRecord] = field(init=False)
    _detectors: Detectors = field(init=False)
    _log: VerdictLog | None = None
    _unwritten: list[Verdict] = field(default_factory=list)
    _full: str = ""  # why the last trial could not write
    _trial_at: float = 0.0
    _problems: set[str] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._detectors = Detectors(self.attempt.number, self._peers, self._located)
        self._train = RecordTail(self.attempt.run.metrics / "train.jsonl", TrainRecord.from_line)

    def start(self) -> None:
        """Look until `close`."""
        self._thread = threading.Thread(target=self._look_until_over, name="observation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Judge the last windows. The end of the attempt waits for that at most `JOIN_S`."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _look_until_over(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.look()
        self.look()
        if self._log is not None:
            self._trying(self._log.close)
        if self.means is not None:
            self._trying(self.means.close)

    def look(self) -> None:
        """Judge what is new, and record who requested what."""
        self._trying(self._look)
        self._trying(lambda: move_requests(self.attempt))

    def _trying(self, part: Callable[[], None]) -> None:
        """Call a part; report each problem once, since the attempt does not depend on it."""
        try:
            part()
        except (ToolkitError, OSError) as error:
            self._trial_at = 0.0  # a quota may be the reason
            self._report(str(error))

    def _look(self) -> None:
        # All that can fail precedes the windows and samples, which are read once.
        is_paused, left_s = self._is_paused(), self.left_s()
        training = [record for record in self._train.new() if record.attempt == self.attempt.number]
        samples: list[Sample] = [LossSample(time.time(), record.step, record.loss) for record in training]
        self._trying(lambda: samples.append(self._disk_sample()))
        samples += self._new_samples()
        windows = self._new_windows()
        if (means := self.means) is not None:
            self._trying(lambda: means.add_windows(windows))
        if windows and not self._peers:
            self._trying(self._read_stages)
        verdicts = self._detectors.observe(
            windows, samples, now_s=time.time(),
            walltime_left_s=left_s if math.isfinite(left_s) else None, is_paused=is_paused,
        )  # fmt: skip
        self._trying(lambda: self._record(verdicts))
        if self.alerting is not None:
            self.alerting.look(windows, training, verdicts, is_over=self._over.is_set())

    def _read_stages(self) -> None:
        if mesh := read_json_or_none(self.attempt.mesh):
            self._peers.update(enumerate(mesh["stages"]))

    def _disk_sample(self) -> DiskSample:
        """Return the state of the file system; a file is written every `QUOTA_PERIOD_S`, while it is full, or after an error."""
        writes = bool(self._full) or time.monotonic() >= self._trial_at
        sample = disk_sample(self.attempt.run.path, writes=writes)
        if writes:
            self._full, self._trial_at = sample.full, time.monotonic() + QUOTA_PERIOD_S
        return sample

    def _located(self, verdict: Verdict) -> Verdict:
        """Return a verdict that is about to be raised; if it is a stall, with the rank, the operation and the line."""
        if verdict.kind is not VerdictKind.STALL or self.culprit is None or self._over.is_set():
            return verdict
        try:
            found = self.culprit()
        except (ToolkitError, OSError) as error:  # the file system may be what stalls the ranks
            self._report(str(error))
            return verdict
        ranks, host = (found.ranks, found.host) if found.ranks else (verdict.ranks, verdict.host)
        return replace(
            verdict, ranks=ranks, host=host, cause=found.cause, message=f"{verdict.message}: {found.sentence}"
        )

    def _new_windows(self) -> list[Window]:
        found = []
        for path in sorted(self.attempt.windows.glob("rank-*.bin")):
            try:
                found += self._readers.setdefault(path, WindowReader(path)).new()
            except (ToolkitError, OSError) as error:  # those of other nodes count nevertheless
                self._report(str(error))
        return found

    def _new_samples(self) -> Iterator[Sample]:
        for path in sorted(self.attempt.windows.glob("rank-*.json")):
            try:
                written_ns = path.stat().st_mtime_ns
                if self._states.get(path) != written_ns:
                    self._states[path] = written_ns
                    yield from samples_in(path)
            except (ToolkitError, OSError) as error:
                self._report(str(error))

    def _is_paused(self) -> bool:
        """Return whether the ranks are validating, or saving: a draft of a checkpoint that is not too old exists."""
        drafts = self.attempt.run.checkpoints.glob(f"step-*.part-{self.attempt.number}-*")
        try:
            is_saving = any(time.time() - draft.stat().st_mtime < LONGEST_SAVE_S for draft in drafts)
        except FileNotFoundError:  # the save has just ended
            is_saving = True
        return is_saving or self.attempt.validating.exists()

    def _record(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            say(f"verdict: {line_of_verdict(verdict)}")
        self._unwritten += verdicts  # a full disk may prevent that the file is created
        if self._unwritten and self._log is None:
            self._log = VerdictLog(self.attempt.run.metrics / "verdicts.jsonl")
        if self._log is not None:
            self._log.retry()
        while self._unwritten and self._log is not None:
            self._log.write(self._unwritten.pop(0))

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            say(f"cannot judge the run: {problem}")
