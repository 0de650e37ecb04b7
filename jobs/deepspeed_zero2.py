"""DeepSpeed with ZeRO 2 that continues after a walltime, a preemption, a crash, or `toolkit stop` and `toolkit resume`.

toolkit run deepspeed_zero2 -n 2
"""

import argparse
import os
import time
from pathlib import Path

import deepspeed
import torch

from toolkit.integrations.deepspeed import ToolkitLoop, prepare_extensions

CONFIGURATION = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each step, to try out requests")
    options = parser.parse_args()
    prepare_extensions("deepspeed")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    engine, *_others = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIGURATION)
    folder = Path(os.environ.get("TOOLKIT_RUN_DIR", "out")) / "checkpoints"
    loop = ToolkitLoop(engine, folder, every=options.save_every)
    for number in range(loop.load(), options.steps):
        time.sleep(options.pause)
        noise = torch.Generator().manual_seed(number * engine.world_size + engine.global_rank)
        inputs = torch.randn(4, 8, generator=noise)
        loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {number + 1}: loss {loss.item():.9g}", flush=True)
        if loop.step(loss=loss, is_last=number + 1 == options.steps):
            break
    else:
        print(f"rank {engine.global_rank} of {engine.world_size}: {engine.global_steps} steps are done")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
