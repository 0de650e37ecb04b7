"""The table [train]: the training loop's numbers."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value

__all__ = ["DDP_BUCKET_MB", "SEVERAL_STAGES", "ParallelTable", "TrainTable", "micro_batch_fix", "no_micro_batches"]


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
    validate_every: int = key(0, "Steps between validations; 0 disables them.", ge=0)
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


DDP_BUCKET_MB = 25.0  # torch's own default


class ParallelTable(Table):
    """ranks = pp x replicate x shard x cp x tp; ep divides shard x cp."""

    replicate: int = key(0, "Copies of the model; 0 uses the ranks that the other dimensions leave.", ge=0)
    shard: int = key(1, "Ranks over which parameters and optimizer state are sharded.", ge=1)
    zero: Literal[0, 1, 2, 3] = key(
        0,
        "What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.",
        derived="3 when `shard` > 1, else 0",
    )
    tp: int = key(1, "Tensor parallel ranks.", ge=1)
    sequence: bool = key(
        False,
        "With `tp` > 1: between the split matrices, each rank keeps only its part of the sequence, for norms and dropout.",
    )
    pp: int = key(1, "Ranks of a pipeline, each with `stages_per_rank` of its stages.", ge=1)
    cp: int = key(1, "Context parallel ranks.", ge=1)
    ep: int = key(1, "Expert parallel ranks, out of shard x cp.", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = key(
        "1f1b", "The order in which the ranks of a pipeline run micro-batches forward and backward."
    )
    stages_per_rank: int = key(
        1,
        "Pipeline stages of each rank; more than one requires `interleaved` or `zero_bubble`.",
        derived='2 with `schedule = "interleaved"`, else 1',
        ge=1,
    )
    balance: Literal["measured", "parameters", "even"] = key(
        "measured",
        "What is balanced when blocks are assigned to pipeline stages: their time on rank 0, their parameters, their number.",
    )
    wrap: Literal["blocks", "size"] = key(
        "blocks",
        "What a sharded model gathers at once: the model's blocks, or modules with at least `wrap_parameters` parameters.",
    )
    wrap_parameters: int = key(
        1_000_000, 'Minimum number of parameters of a module that is gathered separately, with `wrap = "size"`.', ge=1
    )
    gather_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Type in which sharded parameters are gathered and computed with; `as_is` is their stored type."
    )
    reduce_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Type in which the gradients of sharded parameters are summed; `as_is` is their own type."
    )
    unused_parameters: bool = key(
        False, "Search for parameters without a gradient in every step, for models that skip some of their parts."
    )
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["measured"] = key(
        DDP_BUCKET_MB,
        "MiB of gradients that replicas sum at once; `measured` tries some sizes before the first step, and may choose "
        "another one in a later attempt, whose sums then differ in their last bits.",
        form='a number above 0, or "measured"',
    )
    reduction: Literal["auto", "flat", "hierarchical", "measured"] = key(
        "auto",
        "How gradients are summed; `auto` is hierarchical on several nodes with several ranks each, `measured` measures the "
        "links for a few seconds (only on the CPU; later attempts on the same nodes reuse the result).",
    )
    placement: Literal["auto", "launched"] = key(
        "auto",
        "Which rank has which position in the mesh; `auto` places it on NVLink cliques, nodes and leaf switches if that is "
        "predicted to be faster, `launched` keeps the ranks in their order.",
    )

    @property
    def model_ranks(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.pp * self.shard * self.cp * self.tp

    def sizes(self, ranks: int) -> dict[str, int]:
        """Ranks of each dimension in the mesh's order, then `ep`; `replicate` 0 uses the rest of `ranks`."""
        replicate = self.replicate or max(1, ranks // self.model_ranks)
        return {"pp": self.pp, "replicate": replicate, "shard": self.shard, "cp": self.cp, "tp": self.tp, "ep": self.ep}


SEVERAL_STAGES = ("interleaved", "zero_bubble")  # schedules of ranks with several stages


def no_micro_batches(parallel: ParallelTable, number: int) -> str:
    """Why a pipeline cannot run `number` micro-batches per step; "" if it can."""
    amount = f"{number} micro-batch{'' if number == 1 else 'es'} per step"
    if number < parallel.pp:
        return f"{amount}: too few for the {parallel.pp} ranks of the pipeline"
    rounds = number // parallel.pp
    if parallel.schedule in SEVERAL_STAGES and number % rounds:
        return f'{amount} do not divide into {rounds} equal rounds over {parallel.pp} ranks (schedule "{parallel.schedule}")'
    return ""


def fitting_micro_batch(parallel: ParallelTable, share: int, wanted: int) -> int:
    """The size of a micro-batch closest to `wanted` with which `share` samples per step fit; 0 if none does."""
    fits = [size for size in range(1, share + 1) if share % size == 0 and not no_micro_batches(parallel, share // size)]
    return min(fits, key=lambda size: (abs(size - wanted), size), default=0)


def micro_batch_fix(parallel: ParallelTable, share: int, wanted: int, data_ranks: int) -> str:
    """The settings that fit; `wanted` is the present `train.micro_batch`, 0 for a share in one piece."""
    size = fitting_micro_batch(parallel, share, wanted or share)
    if size:
        return f"micro_batch = {size}"
    size = max(1, wanted)
    present = share // size
    fits = [number for number in range(1, present + 2 * parallel.pp) if not no_micro_batches(parallel, number)]
    number = min(fits, key=lambda number: (abs(number - present), number))
    return f"batch = {data_ranks * number * size} with micro_batch = {size}"
