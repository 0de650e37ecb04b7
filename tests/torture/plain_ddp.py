"""What anybody would write for `torchrun --max-restarts`: DDP on gloo, a checkpoint each step, nothing of ours.

Rank 1 kills itself after each new step. argv: a folder, and the number of steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    latest = folder / "latest.pt"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if latest.exists():
        saved = torch.load(latest, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model(torch.randn(6, 32)).square().mean().backward()
    optimizer.step()
    step += 1
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, latest.with_suffix(".part"))
        latest.with_suffix(".part").rename(latest)
        with (folder / "steps.log").open("a") as log:
            log.write(f"{time.time()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step}\n")
    dist.barrier()
    if step < steps:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # as any step of a training loop: ranks meet, or hear that one is gone
    dist.destroy_process_group()


main()
