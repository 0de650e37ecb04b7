"""What a job may hang into a training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.metrics.training import TrainRecord
from toolkit.train.held_out import Validation
from toolkit.train.state import TrainingState


class Callback:
    """Called by the loop on all ranks, at the same steps; write the methods that you need.

    What it keeps for a resume, it gives to `TrainingState(extra=...)`. An exchange between ranks in it is made on all.
    """

    def on_begin(self, state: TrainingState) -> None:
        """Before the first step, after a resume."""

    def on_step(self, state: TrainingState, record: TrainRecord) -> None:
        """After an optimizer step whose record is written."""

    def on_save(self, state: TrainingState, folder: Path | None) -> None:
        """After a checkpoint; `folder` is None where it is still being written."""

    def on_validation(self, state: TrainingState, found: Validation) -> None:
        """After a validation."""

    def on_end(self, state: TrainingState, *, stopped: bool) -> None:
        """After the last step of this attempt; `stopped` when it was asked to stop before the run's end."""


class Callbacks(Callback):
    """Several, called in their order. An error of one keeps its kind, and says whose it is."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def on_begin(self, state: TrainingState) -> None:
        for callback in self._callbacks:
            with _named(callback, "on_begin", state):
                callback.on_begin(state)

    def on_step(self, state: TrainingState, record: TrainRecord) -> None:
        for callback in self._callbacks:
            with _named(callback, "on_step", state):
                callback.on_step(state, record)

    def on_save(self, state: TrainingState, folder: Path | None) -> None:
        for callback in self._callbacks:
            with _named(callback, "on_save", state):
                callback.on_save(state, folder)

    def on_validation(self, state: TrainingState, found: Validation) -> None:
        for callback in self._callbacks:
            with _named(callback, "on_validation", state):
                callback.on_validation(state, found)

    def on_end(self, state: TrainingState, *, stopped: bool) -> None:
        for callback in self._callbacks:
            with _named(callback, "on_end", state):
                callback.on_end(state, stopped=stopped)


@contextmanager
def _named(callback: Callback, method: str, state: TrainingState) -> Iterator[None]:
    """The note stands below the traceback, which must begin in the callback's own code."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the callback {type(callback).__qualname__}.{method} at step {state.step}")
        raise
