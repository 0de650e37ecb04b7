"""A loop with accelerate in a run: it reports steps and metrics, saves, also on request, and continues."""

import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from toolkit.terminal.talk import say_beside
from toolkit.world.own_loop import agree, begin, record_metrics, should_save
from toolkit.world.step import step

__all__ = ["ToolkitLoop"]


class ToolkitLoop:
    """The checkpoints of a loop, `folder/state-N`, by `Accelerator.save_state`.

    Args:
        accelerator: has prepared, or registered for checkpointing, all that a resume needs.
        folder: all nodes must see it.
        every: steps between saves; 0 saves on request and at the last step only.
        keep: how many checkpoints remain.
    """

    def __init__(self, accelerator: Accelerator, folder: str | Path, *, every: int = 0, keep: int = 2) -> None:
        self._accelerator, self._folder, self._every, self._keep = accelerator, Path(folder), every, keep

    def load(self) -> int:
        """Load the newest checkpoint on all ranks, and return the number of finished steps, 0 without a checkpoint.

        Raises:
            OwnFailureError: ranks see different checkpoints.
        """
        saved = self._saved()
        number = max(saved, default=0)
        begin(number)
        if saved:
            self._accelerator.load_state(str(saved[number]))
        return number

    def step(self, number: int, *, is_last: bool = False, **metrics: Any) -> bool:
        """Report that `number` steps are finished, on all ranks after each step; return True if the program must end now.

        A stop request, such as a walltime, a preemption or `toolkit stop`, saves before. `metrics` are recorded for the step.
        """
        record_metrics(metrics)
        step(number)
        stops = agree(number)
        is_due = is_last or (self._every > 0 and number % self._every == 0)
        if stops or is_due or should_save():
            self._save(number)
        if stops and self._accelerator.is_main_process:
            say_beside(f"saved at step {number} in {self._folder}, and ends on request")
        return stops

    def _save(self, number: int) -> None:
        """Save under a name that no load looks for, and rename it when all ranks have written."""
        target, part = self._folder / f"state-{number}", self._folder / f"state-{number}.part"
        accelerator = self._accelerator
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was killed
        accelerator.wait_for_everyone()
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            older = self._folder / f"state-{number}.old"
            if target.exists():  # the same state, which remains until the new one is in its place
                target.rename(older)
            part.rename(target)
            shutil.rmtree(older, ignore_errors=True)
            saved = self._saved()
            for expired in sorted(saved)[: -self._keep]:
                shutil.rmtree(saved[expired])

    def _saved(self) -> dict[int, Path]:
        found = [path for path in self._folder.glob("state-*") if re.fullmatch(r"state-\d+", path.name)]
        return {int(path.name.removeprefix("state-")): path for path in found}
