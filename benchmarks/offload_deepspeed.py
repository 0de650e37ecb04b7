"""A training step of DeepSpeed's ZeRO-Infinity with optimizer state and parameters on a disk, beside `offload_limit.py`.

    apt-get install libaio-dev; pip install deepspeed==0.19.8 ninja     # in an environment of its own with toolkit
    python benchmarks/offload_deepspeed.py FOLDER [--steps 3] [--device none]

FOLDER is on the disk to measure. The model, the samples of a step and the number of threads are those of
`offload_limit.py`, recomputation too. Prints the time of each step and the peak of the process's memory (VmHWM). The
first start compiles DeepSpeed's extensions for minutes. Memory is not limited: DeepSpeed does not run below that limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs.train_lm import GPT, Arguments, loss_of

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
BATCH, CONTEXT = 2, 128


def settings(folder: str, device: str) -> dict[str, object]:
    tier = {"device": device, "nvme_path": folder, "pin_memory": False}
    zero: dict[str, object] = {"stage": 3}
    if device != "none":
        zero |= {"offload_optimizer": {**tier, "buffer_count": 4}, "offload_param": {**tier, "buffer_size": 60_000_000}}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 2, "overlap_events": True},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("nvme", "none"), default="nvme")
    options = parser.parse_args()
    os.environ |= ALONE | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    import deepspeed

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    model = GPT(Arguments(layers=24, width=1024, heads=16, context=CONTEXT, dropout=0.0))
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda stream, plain=plain: checkpoint(plain, stream, use_reentrant=False)
    engine, *_ = deepspeed.initialize(model=model, config=settings(options.folder, options.device))
    text = torch.randint(256, (BATCH, CONTEXT + 1))
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        loss = loss_of(engine(text[:, :-1]), text[:, 1:])
        engine.backward(loss)
        engine.step()
        taken, peak_gb = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(f"step {step}: loss {float(loss):.6f}, {taken:.1f} s, VmHWM {peak_gb:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
