"""A transformers Trainer that continues after a walltime, a preemption, a crash, or `toolkit stop` and `toolkit resume`.

toolkit run hf_trainer -n 2
"""

import argparse
import os
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from toolkit.integrations.transformers import ToolkitCallback, newest_checkpoint


class Counting(torch.utils.data.Dataset):
    """Sequences of numbers, each with its own period."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.pause_s)
        tokens = torch.arange(16) % (index % 7 + 2)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each sample, to try out requests")
    options = parser.parse_args()
    folder = Path(os.environ.get("TOOLKIT_RUN_DIR", "out")) / "checkpoints"
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=options.steps, per_device_train_batch_size=2, logging_steps=1,
        save_steps=options.save_every, save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(options.pause), callbacks=[ToolkitCallback()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder))
    print(f"rank {arguments.process_index} of {arguments.world_size}: {trainer.state.global_step} steps are done")


if __name__ == "__main__":
    main()
