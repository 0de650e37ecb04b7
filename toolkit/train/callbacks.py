"""Hooks that a job adds to the training loop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.metrics.training import TrainRecord
from toolkit.train.held_out import Validation
from toolkit.train.state import TrainingState


class Callback:
    """Methods that the loop calls on all ranks at the same steps; override those that you need.

    Pass state that a resume needs to `TrainingState(extra=...)`. A collective in a hook must run on all ranks.
    """

    def on_begin(self, state: TrainingState) -> None:
        """Called before the first step, after a resume."""

    def on_step(self, state: TrainingState, record: TrainRecord) -> None:
        """Called after an optimizer step, once its record is written."""

    def on_save(self, state: TrainingState, folder: Path | None) -> None:
        """Called after a save; `folder` is None if the save continues in the background."""

    def on_validation(self, state: TrainingState, found: Validation) -> None:
        """Called after a validation."""

    def on_end(self, state: TrainingState, *, stopped: bool) -> None:
        """Called after the last step of this attempt; `stopped` is True if a stop request ended it."""


class Callbacks(Callback):
    """Calls several callbacks in order. An exception keeps its type, and a note names the callback."""

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
    """Add a note with the callback, method and step to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the callback {type(callback).__qualname__}.{method} at step {state.step}")
        raise
