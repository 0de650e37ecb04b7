"""A Lightning Trainer that continues after a walltime, a preemption, a crash, or `toolkit stop` and `toolkit resume`.

toolkit run lightning_fit -n 2
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from toolkit.integrations.lightning import ToolkitCallback, newest_checkpoint, trainer_options


class Samples:
    """Batches of this rank, a function of their number. Lightning saves and restores the position of such a loader."""

    def __init__(self, batches: int, pause_s: float) -> None:
        self.batches, self.pause_s, self.position = batches, pause_s, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        while self.position < self.batches:
            time.sleep(self.pause_s)
            noise = torch.Generator().manual_seed(self.position * ranks + rank)
            inputs = torch.randn(4, 8, generator=noise)
            self.position += 1
            yield inputs, inputs.sum(1, keepdim=True)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Sum(lightning.LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: loss {loss.item():.9g}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each batch, to try out requests")
    options = parser.parse_args()
    folder = Path(os.environ.get("TOOLKIT_RUN_DIR", "out")) / "checkpoints"
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        **trainer_options(), accelerator="cpu", strategy="ddp", max_steps=options.steps, use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=options.save_every), ToolkitCallback(folder)],
        logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Sum(), Samples(25, options.pause), ckpt_path=newest_checkpoint(folder))
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps are done")


if __name__ == "__main__":
    main()
