"""The table [train]: the training loop's numbers."""

from __future__ import annotations

from typing import Literal

from toolkit.config.table import Table, key


class TrainTable(Table):
    """The batch is global, so that a run means the same on any number of ranks."""

    steps: int = key(1000, "Optimizer steps of the whole run.", ge=1)
    batch: int = key(64, "Samples of one optimizer step over all ranks.", ge=1)
    micro_batch: int = key(
        0, "Samples of one forward pass on one rank; 0 takes the rank's whole share of the batch.", ge=0
    )
    lr: float = key(3e-4, "Largest learning rate.", gt=0)
    min_lr_ratio: float = key(0.1, "Last learning rate as a share of `lr`.", ge=0, le=1)
    warmup_steps: int = key(100, "Steps in which the learning rate rises from 0 to `lr`.", ge=0)
    schedule: Literal["cosine", "constant"] = key("cosine", "Course of the learning rate after warm-up.")
    weight_decay: float = key(0.1, "AdamW's weight decay.", ge=0)
    clip_norm: float = key(1.0, "Largest norm of the gradients; 0 does not clip.", ge=0)
    seed: int = key(0, "Seed of weights, data order and dropout.", ge=0)
    deterministic: bool = key(True, "Use deterministic kernels only.")
    precision: Literal["auto", "fp32", "bf16"] = key(
        "auto", "Type of the computation; `auto` is bf16 on a GPU, else fp32."
    )
    log_every: int = key(1, "Steps between lines of metrics/train.jsonl.", ge=1)
