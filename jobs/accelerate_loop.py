"""A loop with accelerate that continues after a walltime, a preemption, a crash, or `toolkit stop` and `toolkit resume`.

toolkit run accelerate_loop -n 2
"""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from toolkit.integrations.accelerate import ToolkitLoop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step, to try out requests")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inputs = torch.randn(200, 8)
    samples = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, samples = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), samples)
    folder = Path(os.environ.get("TOOLKIT_RUN_DIR", "out")) / "checkpoints"
    loop = ToolkitLoop(accelerator, folder, every=options.save_every)
    number = loop.load()
    while number < options.steps:
        for x, y in accelerator.skip_first_batches(samples, number % len(samples)):
            time.sleep(options.pause)
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            accelerator.print(f"step {number}: loss {loss.item():.9g}", flush=True)
            is_last = number == options.steps
            if loop.step(number, loss=loss, is_last=is_last):
                return
            if is_last:
                break
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {number} steps are done")


if __name__ == "__main__":
    main()
