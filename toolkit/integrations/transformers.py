"""The Trainer of transformers in a run: it reports steps and metrics, saves on request, and continues."""

import re
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from toolkit.terminal.talk import say_beside
from toolkit.world.own_loop import agree, begin, record_metrics, should_save
from toolkit.world.step import step

__all__ = ["ToolkitCallback", "newest_checkpoint"]


class ToolkitCallback(TrainerCallback):
    """Reports each step and what the Trainer logs; at a stop request all ranks save after the same step and leave the program.

    A stop request is a walltime, a preemption, `toolkit stop` or Ctrl-C. The program leaves at the end of `train()` with exit
    code 0, so that code after it runs only when training is complete. At `toolkit save`, all ranks save and continue.
    """

    def __init__(self) -> None:
        self._stops = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Start to accept requests."""
        begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Let all ranks agree on requests. The step ends later, when its metrics are known."""
        if control.should_training_stop:  # the last step
            return
        self._stops = agree(state.global_step)
        if self._stops or should_save():
            control.should_save = True
        if self._stops:
            control.should_training_stop, control.should_evaluate = True, False  # it evaluates before it saves

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_others: Any) -> None:
        """Record metrics."""
        record_metrics(logs or {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Report the step before."""
        step(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Report in an evaluation that the program still runs."""
        step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Log where a requested stop saved."""
        if self._stops and state.is_world_process_zero:
            say_beside(f"saved at step {state.global_step} in {args.output_dir}, and ends on request")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Skip what a Trainer does at the end of an epoch if a stop ended it."""
        if self._stops:
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        """Leave the program after a requested stop."""
        step(state.global_step)
        if self._stops:
            sys.exit(0)


def newest_checkpoint(folder: str | Path) -> str | None:
    """Return the newest complete `checkpoint-STEP` of a folder, for `Trainer.train(resume_from_checkpoint=...)`; None without one.

    A Trainer writes `trainer_state.json` last, so a checkpoint without it was interrupted.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    steps = {int(path.name.removeprefix("checkpoint-")): path for path in found if re.search(r"-\d+$", path.name)}
    return str(steps[max(steps)]) if steps else None
