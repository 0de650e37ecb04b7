"""Lightning's Trainer in a run: its number of ranks, steps and metrics, saves on request, and the checkpoint to continue from.

It uses the package `pytorch_lightning` instead of `lightning` if the program has imported only that one.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.terminal.talk import say_beside
from toolkit.world.own_loop import agree, begin, record_metrics, should_save
from toolkit.world.step import step

__all__ = ["ToolkitCallback", "newest_checkpoint", "trainer_options"]

_IS_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_callback: Any = import_module("pytorch_lightning" if _IS_OLD else "lightning.pytorch").Callback
_PREFIX = "toolkit-step="


def trainer_options() -> dict[str, Any]:
    """Return `devices`, `num_nodes` and `plugins` of a `Trainer` or `Fabric` for the ranks of the run; {} outside of a run.

    The plugin takes the ranks from toolkit, under every launcher, and never requeues the job: toolkit does.
    """
    if "TOOLKIT_RUN_DIR" not in os.environ:
        return {}
    environments: Any = import_module(f"{'lightning_fabric' if _IS_OLD else 'lightning.fabric'}.plugins.environments")
    return {
        "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
        "num_nodes": int(os.environ["GROUP_WORLD_SIZE"]),
        "plugins": [environments.TorchElasticEnvironment()],
    }


class ToolkitCallback(_callback):
    """Reports each step and its metrics; at a stop request all ranks save after the same step and leave the program.

    A stop request is a walltime, a preemption, `toolkit stop` or Ctrl-C. Then the program leaves `fit()` with exit code 0, so
    that code after it runs only when training is complete. At `toolkit save`, all ranks save and continue. The last such
    checkpoint remains in `folder`, which all nodes must see. Put this callback behind those that change the model.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._number = Path(folder), -1

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace Lightning's handler of SIGTERM, which ends training without a save, or ignores the signal."""
        begin(trainer.global_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to accept requests."""
        begin(trainer.global_step)
        self._number = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a step, and let all ranks agree on requests."""
        number = trainer.global_step
        if number == self._number:  # gradients accumulate
            return
        self._number = number
        if number % max(1, trainer.log_every_n_steps) == 0:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                record_metrics({"loss": loss * trainer.accumulate_grad_batches})  # Lightning has divided it
            record_metrics(trainer.callback_metrics)
        step(number)
        stops = agree(number)
        if stops or should_save():
            self._save(trainer, "and ends on request" if stops else "on request")
        if stops:
            sys.exit(0)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_others: Any) -> None:
        """Report in a validation that the program still runs."""
        step(trainer.global_step)

    def _save(self, trainer: Any, why: str) -> None:
        path = self._folder / f"{_PREFIX}{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            for older in {*self._folder.glob(f"{_PREFIX}*.ckpt")} - {path}:
                trainer.strategy.remove_checkpoint(older)
            say_beside(f"saved at step {trainer.global_step} in {path}, {why}")


def newest_checkpoint(folder: str | Path) -> str | None:
    """Return the newest complete `*.ckpt` of a folder, for `Trainer.fit(ckpt_path=...)`; None if there is none.

    A checkpoint of several files is a folder, in which `meta.pt` is written last.
    """
    found = [path for path in Path(folder).glob("*.ckpt") if path.is_file() or (path / "meta.pt").exists()]
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None
