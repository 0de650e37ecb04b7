"""The table [train]: the training loop's numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value


class TrainTable(Table):
    """The batch is global, so that a run has the same meaning on any number of ranks."""

    steps: int = key(1000, "Optimizer steps of the whole run.", ge=1)
    batch: int = key(64, "Samples of one optimizer step over all ranks.", ge=1)
    micro_batch: int = key(
        0, "Samples of one forward pass on one rank; 0 uses the rank's whole share of the batch.", ge=0
    )
    lr: float = key(3e-4, "Largest learning rate, before `lr_scaling`.", gt=0)
    min_lr_ratio: float = key(0.1, "Last learning rate as a share of the largest.", ge=0, le=1)
    warmup_steps: int = key(100, "Steps of the warm-up, in which the learning rate rises to `lr`.", ge=0)
    schedule: Literal["cosine", "linear", "constant", "one_cycle"] = key(
        "cosine",
        "Schedule of the learning rate after warm-up. `one_cycle` rises by half a cosine, from 1/25 of the largest, and ends "
        "exactly at the last step.",
    )
    lr_reference_batch: int = key(0, "With `lr_scaling`: the batch for which `lr` was chosen.", ge=0)
    lr_scaling: Literal["none", "linear", "square_root", "adaptive"] = key(
        "none",
        "How the learning rate depends on `batch / lr_reference_batch`: times that ratio, from `lr` itself in the warm-up "
        "(`linear`), times its square root, or times the gain that AdaScale measures at each step, between 1 and the ratio.",
    )
    optimizer: Literal["adamw", "muon", "sgd"] = key(
        "adamw",
        "The optimizer. `muon` updates the matrices of the model's blocks, with AdamW for embeddings, heads and vectors, "
        "both at the same rate.",
    )
    betas: list[float] = key(
        None, "AdamW's two decay rates.", form="two numbers in [0, 1)", default_factory=lambda: [0.9, 0.95]
    )
    momentum: float = key(
        0.9, "Momentum of sgd and muon, with Nesterov's step unless it is 0; Muon's authors use 0.95.", ge=0, lt=1
    )
    weight_decay: float = key(0.1, "Decay of matrices at each step, times the rate; vectors do not decay.", ge=0)
    clip_norm: float = key(1.0, "Largest norm of the gradients; 0 does not clip.", ge=0)
    seed: int = key(0, "Seed of weights, data order and dropout.", ge=0)
    deterministic: bool = key(True, "Use only deterministic kernels.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "Type of the computation; `auto` is bf16 on a GPU, else fp32. fp16 scales the loss, and adapts the scale after overflows.",
    )
    activation_budget_gb: float = key(
        0.0, 'With `recompute = "budget"`: maximum GB of activations that one micro-batch keeps on a rank.', ge=0
    )
    recompute_every: int = key(
        1, 'With `recompute = "every"`: each block whose number is a multiple of this is recomputed; 1 is all.', ge=1
    )
    recompute_above_mb: float = key(
        0.0, 'With `recompute = "large"`: recompute blocks whose activations need more MB than this.', ge=0
    )
    recompute: Literal["none", "every", "large", "selective", "budget"] = key(
        "none",
        "Which blocks release their activations and recompute them in the backward pass: none, every n-th, the large ones, all "
        "but the results of matrix products and attention, or the cheapest that meet `activation_budget_gb`.",
    )
    compile: bool = key(False, "Compile each of the model's blocks with torch.compile; nodes need a compiler.")
    channels_last: bool = key(
        False, "Store images with their channels last, which is faster for convolutions on tensor cores."
    )
    average_decay: float = key(
        0.0,
        "Decay of a moving average of the weights, which is saved and used for validation; 0 keeps none.",
        ge=0,
        lt=1,
    )
    validate_every: int = key(0, "Steps between validations; 0 makes none.", ge=0)
    early_stop_patience: int = key(
        0, "Validations without an improvement after which the run ends; 0 never ends it early.", ge=0
    )
    early_stop_min_delta: float = key(0.0, "With `early_stop_patience`: the minimum improvement, exclusive.", ge=0)
    guard: Literal["off", "skip", "roll_back"] = key(
        "off",
        "The effect of a spike, or of a loss or gradient norm that is not finite: skip the update, or return to the last "
        "checkpoint and past the samples since.",
    )
    guard_deviations: float = key(
        8.0, "With `guard`: the number of robust standard deviations above the median that counts as a spike.", gt=0
    )
    guard_window: int = key(64, "With `guard`: number of steps in the median.", ge=8)
    guard_limit: int = key(10, "With `guard`: maximum number of bad steps of a run.", ge=0)
    log_every: int = key(1, "Steps between lines in metrics/train.jsonl.", ge=1)
    profile_steps: int = key(
        0,
        "Number of steps to profile, into metrics/profile.json and metrics/trace.json; 0 profiles none.",
        ge=0,
        le=10_000,
    )
    profile_from: int = key(10, "First step to profile, counted from 1.", ge=1)

    @field_validator("betas")
    @classmethod
    def _two_betas(cls, betas: list[float]) -> list[float]:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise refuse_value((), f"{betas} are not two numbers in [0, 1)", "betas = [0.9, 0.95]")
        return betas

    @field_validator("lr_scaling")
    @classmethod
    def _scaled_from_something(cls, lr_scaling: str, info: ValidationInfo) -> str:
        if lr_scaling != "none" and info.data.get("lr_reference_batch") == 0:
            raise refuse_value(
                (), f"{lr_scaling!r} needs the batch for which `lr` was chosen", "set train.lr_reference_batch"
            )
        return lr_scaling

    @field_validator("recompute")
    @classmethod
    def _recomputed_by_a_number(cls, recompute: str, info: ValidationInfo) -> str:
        for kind, name in (("budget", "activation_budget_gb"), ("large", "recompute_above_mb")):
            if recompute == kind and info.data.get(name) == 0:
                raise refuse_value((), f"{recompute!r} needs a number", f"set train.{name}")
        return recompute

    @field_validator("early_stop_patience")
    @classmethod
    def _stopped_by_validation(cls, patience: int, info: ValidationInfo) -> int:
        if patience and info.data.get("validate_every") == 0:
            raise refuse_value((), "counts validations, but there are none", "set train.validate_every")
        return patience
