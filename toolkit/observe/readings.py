"""What the ranks and nodes of a run recorded, read from the run directory while the run is active."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.checkpoints import SaveRecord
from toolkit.metrics.detectors.disk import with_disk
from toolkit.metrics.own import OwnTail
from toolkit.metrics.records import RecordTail
from toolkit.metrics.samples import Sample
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.validation import ValidationRecord
from toolkit.metrics.verdicts import Verdict, open_verdicts
from toolkit.metrics.window_file import WindowReader
from toolkit.metrics.windows import Window
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.node_state import samples_in

__all__ = ["RunReadings"]


@dataclass
class RunReadings:
    """The recorded metrics of one run or task. Each `update` reads only what is new.

    Windows and samples are those of the newest attempt; training, validations, saves and verdicts are those of all
    attempts, each in the order of its file.
    """

    run: RunDirectory
    attempt: int | None = None
    grid: WindowGrid | None = None  # if given, it gets the windows, in bounded memory, and `windows` remains empty
    attempts: dict[int, tuple[StartRecord | None, AttemptRecord | None]] = field(default_factory=dict)  # by number
    windows: dict[int, list[Window]] = field(default_factory=dict)  # by rank, in the order of time
    samples: dict[Path, list[Sample]] = field(default_factory=dict)  # the last state of each node, by its file
    training: list[TrainRecord] = field(default_factory=list)  # each step once
    validations: list[ValidationRecord] = field(default_factory=list)
    saves: list[SaveRecord] = field(default_factory=list)
    own: OwnTail = field(init=False)  # the metrics of the program itself
    verdicts: list[Verdict] = field(default_factory=list)  # all changes
    problems: list[str] = field(default_factory=list)  # files that could not be read, each once

    def __post_init__(self) -> None:
        metrics = self.run.metrics
        self._train = RecordTail(metrics / "train.jsonl", TrainRecord.from_line)
        self.own = OwnTail(metrics)
        self._validation = RecordTail(metrics / "validation.jsonl", ValidationRecord.from_line)
        self._save = RecordTail(metrics / "checkpoints.jsonl", SaveRecord.from_line)
        self._verdict = RecordTail(metrics / "verdicts.jsonl", Verdict.from_line)
        self._readers: dict[Path, WindowReader] = {}
        self._written_ns: dict[Path, int] = {}

    @property
    def raised(self) -> list[Verdict]:
        """The raised verdicts of the newest attempt, the most severe first."""
        if self.attempt is None:
            return []
        raised, (_, end) = open_verdicts(self.verdicts, self.attempt), self.attempts.get(self.attempt, (None, None))
        return raised if end is not None else with_disk(raised, self.run.path)

    def update(self) -> None:
        """Read what was added since the last call. A damaged file is named in `problems`."""
        self._follow_attempt()
        while records := self._train.new():  # a part of a long file
            for record in records:
                while self.training and self.training[-1].step >= record.step:  # steps repeat after a resume
                    self.training.pop()
                self.training.append(record)
        self.own.update()
        self.validations += self._validation.new()
        self.saves += self._save.new()
        self.verdicts += self._verdict.new()

    def _follow_attempt(self) -> None:
        for number in self.run.attempt_numbers():
            if self.attempts.get(number, (None, None))[1] is None:
                try:
                    record = self.run.attempt(number)
                    self.attempts[number] = (StartRecord.read(record), AttemptRecord.read(record))
                except ToolkitError as error:
                    self._report(error)
        attempt = self.run.last_attempt()
        if attempt is None:
            return
        if attempt.number != self.attempt:
            self.attempt = attempt.number
            self.windows, self.samples, self._readers, self._written_ns = {}, {}, {}, {}
            if self.grid is not None:
                self.grid.clear()
        for path in sorted(attempt.windows.glob("rank-*")):
            try:
                if path.suffix == ".bin":
                    reader = self._readers.setdefault(path, WindowReader(path))
                    if self.grid is not None:
                        self.grid.add(reader.contents(), reader.names, reader.host)
                        continue
                    for window in reader.new():
                        self.windows.setdefault(window.rank, []).append(window)
                elif path.suffix == ".json" and path.stat().st_mtime_ns != self._written_ns.get(path):
                    self._written_ns[path] = path.stat().st_mtime_ns
                    self.samples[path] = samples_in(path)
            except (ToolkitError, OSError) as error:
                self._report(error)

    def _report(self, error: Exception) -> None:
        if str(error) not in self.problems:
            self.problems.append(str(error))
