"""A loop with DeepSpeed in a run: it reports steps and metrics, saves, also on request, and continues."""

import re
import shutil
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say_beside
from toolkit.world.compiled_extensions import prepare_extensions
from toolkit.world.own_loop import agree, begin, record_metrics, should_save
from toolkit.world.step import step

__all__ = ["ToolkitLoop", "prepare_extensions"]


class ToolkitLoop:
    """The checkpoints of an engine, `folder/global_stepN`.

    Args:
        engine: what `deepspeed.initialize` returned.
        folder: all nodes must see it.
        every: steps between saves; 0 saves on request and at the last step only.
        keep: how many checkpoints remain.
    """

    def __init__(self, engine: Any, folder: str | Path, *, every: int = 0, keep: int = 2) -> None:
        self._engine, self._folder, self._every, self._keep = engine, Path(folder), every, keep
        self._number = int(engine.global_steps)

    def load(self) -> int:
        """Load the newest checkpoint on all ranks, and return the number of finished steps, 0 without a checkpoint.

        With ZeRO, another number of ranks needs a universal checkpoint: the error names the command that writes it.

        Raises:
            ToolkitError: the checkpoint is of another number of ranks.
        """
        tag, universal = self._tag("latest"), self._tag("latest_universal")
        saved, ranks = self._ranks_of(tag), self._engine.dp_world_size
        is_universal = saved not in (0, ranks) and _step_of(universal) >= _step_of(tag)
        if saved not in (0, ranks) and not is_universal:
            source = self._folder / tag
            raise ToolkitError(
                f"expected a checkpoint of {ranks} data-parallel ranks, got one of {saved}",
                where=str(source),
                fix=f"convert it, then start again: python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
                f"--input_folder {source} --output_folder {source}_universal",
            )
        tag = universal if is_universal else tag
        begin(_step_of(tag))
        if tag:
            # Otherwise a key of DeepSpeed's configuration, which would be wrong after the next save.
            self._engine._config.load_universal_checkpoint = is_universal
            self._engine.load_checkpoint(str(self._folder), tag=tag)
        self._number = int(self._engine.global_steps)
        return self._number

    def step(self, *, is_last: bool = False, **metrics: Any) -> bool:
        """Report a finished step, on all ranks after each `engine.step()`; return True if the program must end now.

        A stop request, such as a walltime, a preemption or `toolkit stop`, saves before. `metrics` are recorded for the step.
        """
        number = int(self._engine.global_steps)
        record_metrics(metrics)
        if number == self._number:  # gradients accumulate
            return False
        self._number = number
        step(number)
        stops = agree(number)
        if stops or is_last or should_save() or (self._every > 0 and number % self._every == 0):
            self._engine.save_checkpoint(str(self._folder), tag=f"global_step{number}")
            if self._engine.global_rank == 0:
                saved = sorted(self._folder.glob("global_step*"), key=lambda path: _step_of(path.name))
                for older in [path for path in saved if not path.name.endswith("_universal")][: -self._keep]:
                    shutil.rmtree(older)
        if stops and self._engine.global_rank == 0:
            say_beside(f"saved at step {number} in {self._folder}, and ends on request")
        return stops

    def _tag(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def _ranks_of(self, tag: str) -> int:
        """Return the number of ranks whose optimizer states a checkpoint has; 0 without ZeRO, or without a checkpoint."""
        files = [path.name for path in (self._folder / tag).glob("*_optim_states.pt")] if tag else []
        return len({match[1] for name in files if (match := re.search(r"zero_pp_rank_(\d+)_", name))})


def _step_of(tag: str) -> int:
    match = re.match(r"global_step(\d+)", tag)
    return int(match[1]) if match else 0
