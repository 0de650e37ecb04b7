"""The tables [train] and [parallel]: the training loop, and how the model is distributed over the ranks."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value

__all__ = [
    "DDP_BUCKET_MB", "SEVERAL_STAGES", "ParallelTable", "TrainTable", "fitting_micro_batch", "micro_batch_fix", "no_micro_batches",
]  # fmt: skip


if TYPE_CHECKING:
    MicroBatch = int  # for all readers: `with_found_micro_batch` has replaced "auto"
else:
    MicroBatch = Annotated[int, Field(ge=0)] | Literal["auto"]


class TrainTable(Table):
    """Options of the training loop. The batch size is global, so that results do not depend on the number of ranks."""

    steps: int = key(1000, "Number of optimizer steps of the whole run.", ge=1)
    batch: int = key(64, "Global batch size: samples per optimizer step, over all ranks.", ge=1)
    micro_batch: MicroBatch = key(
        0,
        "Samples per forward pass on one rank; 0 uses all samples of the rank at once. `auto` finds the largest size that fits, "
        "before the first start of a run here or in an allocation, and again if the ranks, the layout or the model change.",
        form='a number from 0, or "auto"',
    )
    lr: float = key(3e-4, "Peak learning rate, before `lr_scaling`.", gt=0)
    min_lr_ratio: float = key(0.1, "Final learning rate as a fraction of the peak.", ge=0, le=1)
    warmup_steps: int = key(100, "Number of warm-up steps, during which the learning rate rises to `lr`.", ge=0)
    schedule: Literal["cosine", "linear", "constant", "one_cycle"] = key(
        "cosine",
        "Learning rate schedule after the warm-up. `one_cycle` warms up along half a cosine from 1/25 of the peak, and reaches "
        "its end exactly at the last step.",
    )
    lr_reference_batch: int = key(0, "With `lr_scaling`: the batch size for which `lr` was chosen.", ge=0)
    lr_scaling: Literal["none", "linear", "square_root", "adaptive"] = key(
        "none",
        "How to scale the learning rate by the ratio `batch / lr_reference_batch`: `linear` multiplies it by the ratio, and "
        "starts the warm-up from `lr` itself; `square_root` multiplies it by the square root; `adaptive` (AdaScale) by a gain "
        "between 1 and the ratio, measured at each step.",
    )
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = key(
        "adamw",
        "The optimizer. `muon` uses Muon for the matrices of the blocks, and AdamW for embeddings, heads and vectors, with the "
        "same learning rate. `adamw_8bit` keeps the moments of large parameters in 8 bits (`toolkit[quantized]`), on whole "
        "parameters: not with `parallel.shard`, `tp` or `offload`.",
    )
    betas: list[float] = key(
        None, "The two decay rates of AdamW.", form="two numbers in [0, 1)", default_factory=lambda: [0.9, 0.95]
    )
    eps: float = key(1e-8, "The term of AdamW that prevents a division by zero.", gt=0)
    momentum: float = key(
        0.9, "Momentum of sgd and muon; Nesterov momentum unless it is 0. The authors of Muon use 0.95.", ge=0, lt=1
    )
    weight_decay: float = key(0.1, "Decay of matrices per step, times the learning rate; vectors do not decay.", ge=0)
    clip_norm: float = key(1.0, "Gradient norm to which larger gradients are clipped; 0 disables clipping.", ge=0)
    seed: int = key(0, "Random seed for weights, data order and dropout.", ge=0)
    deterministic: bool = key(True, "Use only deterministic kernels.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "Data type for computation; `auto` is bf16 on a GPU, else fp32. `fp16` uses loss scaling that adapts after overflows.",
    )
    activation_budget_gb: float = key(
        0.0, 'With `recompute = "budget"`: maximum GB of activations per micro-batch that a rank keeps.', ge=0
    )
    recompute_every: int = key(
        1, 'With `recompute = "every"`: recompute blocks whose number is a multiple of this; 1 recomputes all.', ge=1
    )
    recompute_above_mb: float = key(
        0.0, 'With `recompute = "large"`: recompute blocks with more than this many MB of activations.', ge=0
    )
    recompute: Literal["none", "every", "large", "selective", "budget"] = key(
        "none",
        "Which blocks recompute their activations in the backward pass instead of keeping them: `none`; `every` n-th; `large` "
        "ones; `selective`, all blocks, but they keep the results of matrix products and attention; `budget`, the cheapest "
        "choice that fits `activation_budget_gb`.",
    )
    memory: Literal["none", "conservative", "balanced", "aggressive", "extreme"] = key(
        "none",
        "Set `parallel.zero`, `recompute`, `offload` and `micro_batch` together, if the job does not set them: `conservative` is "
        "the fastest, `extreme` needs the least memory (docs/parallel.md).",
    )
    offload: (
        Literal["none", "optimizer", "gradients", "parameters", "activations"]
        | list[Literal["optimizer", "gradients", "parameters", "activations"]]
    ) = key(
        "none",
        "What to keep outside of the memory of the device between its uses, in host memory or in `offload_to`: the state of "
        "the `optimizer`, `gradients`, `parameters` of blocks, or `activations` of blocks. Results are the same to the last bit.",
        form='"none", "optimizer", "gradients", "parameters", "activations", or a list of them',
    )
    offload_to: str = key(
        "",
        "With `offload`: an existing folder on a local disk, such as $TMPDIR, whose file is read and written beside the "
        "computation. The default is host memory.",
    )
    offload_activations_as: Literal["as_is", "bf16"] = key(
        "as_is", "With offloaded activations: `bf16` rounds those of type fp32, which changes gradients by about 0.4 %."
    )
    compile: bool = key(False, "Compile each block of the model with torch.compile; the nodes need a C++ compiler.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = key(
        "default",
        "With `compile`: the mode of torch.compile. `reduce-overhead` uses CUDA graphs; `max-autotune` also tries several kernels.",
    )
    channels_last: bool = key(
        False, "Use the channels-last memory format for images, which is faster for convolutions on tensor cores."
    )
    average_decay: float = key(
        0.0,
        "Decay of an exponential moving average of the weights, which is saved and used for validation; 0 disables it.",
        ge=0,
        lt=1,
    )
    validate_every: int = key(0, "Steps between validations; 0 disables them.", ge=0)
    early_stop_patience: int = key(
        0, "Number of validations without an improvement after which the run ends; 0 disables early stopping.", ge=0
    )
    early_stop_min_delta: float = key(
        0.0, "With `early_stop_patience`: the metric must improve by more than this.", ge=0
    )
    guard: Literal["off", "skip", "roll_back"] = key(
        "off",
        "What to do when the loss or the gradient norm spikes or is not finite: `skip` skips the update; `roll_back` returns to "
        "the last checkpoint and skips the samples since then.",
    )
    guard_deviations: float = key(
        8.0, "With `guard`: a value this many robust standard deviations above the median counts as a spike.", gt=0
    )
    guard_window: int = key(64, "With `guard`: number of recent steps over which the median is computed.", ge=8)
    guard_limit: int = key(10, "With `guard`: maximum number of bad steps per run; one more fails it.", ge=0)
    log_every: int = key(1, "Steps between lines in metrics/train.jsonl.", ge=1)
    check_replicas_every: int = key(
        0,
        "Steps between comparisons of the parameters of replicas, to the last bit; 0 is never. A difference ends the run, and "
        "names the rank and its node.",
        ge=0,
    )
    measure_memory: bool = key(
        False,
        "Forecast the memory of a step by part, and measure it from the second step on; the result is in metrics/memory.json.",
    )
    profile_steps: int = key(
        0,
        "Number of steps to profile; the results are in metrics/profile.json and metrics/trace.json. 0 disables profiling.",
        ge=0,
        le=10_000,
    )
    profile_from: int = key(10, "First step to profile, counted from 1.", ge=1)

    @property
    def is_auto(self) -> bool:
        """Whether the size of micro-batches is still to be found."""
        return str(self.micro_batch) == "auto"

    @property
    def offloaded(self) -> frozenset[str]:
        """What `offload` names."""
        return frozenset([self.offload] if isinstance(self.offload, str) else self.offload) - {"none"}

    @field_validator("betas")
    @classmethod
    def _two_betas(cls, betas: list[float]) -> list[float]:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise refuse_value((), f"expected two numbers in [0, 1), got {betas}", "set betas = [0.9, 0.95]")
        return betas

    @field_validator("lr_scaling")
    @classmethod
    def _scaled_from_something(cls, lr_scaling: str, info: ValidationInfo) -> str:
        if lr_scaling != "none" and info.data.get("lr_reference_batch") == 0:
            raise refuse_value(
                (), f"{lr_scaling!r} requires the batch size for which `lr` was chosen", "set train.lr_reference_batch"
            )
        return lr_scaling

    @field_validator("recompute")
    @classmethod
    def _recomputed_by_a_number(cls, recompute: str, info: ValidationInfo) -> str:
        for kind, name in (("budget", "activation_budget_gb"), ("large", "recompute_above_mb")):
            if recompute == kind and info.data.get(name) == 0:
                raise refuse_value((), f"{recompute!r} requires train.{name}", f"set train.{name}")
        return recompute

    @field_validator("early_stop_patience")
    @classmethod
    def _stopped_by_validation(cls, patience: int, info: ValidationInfo) -> int:
        if patience and info.data.get("validate_every") == 0:
            raise refuse_value((), "early stopping requires validations", "set train.validate_every")
        return patience


DDP_BUCKET_MB = 25.0  # the default of torch


class ParallelTable(Table):
    """The device mesh: ranks = pp x replicate x shard x cp x tp. ep must divide shard x cp."""

    replicate: int = key(0, "Number of model replicas; 0 is the number of ranks divided by the other dimensions.", ge=0)
    shard: int = key(1, "Number of ranks over which each model replica is sharded (see `zero`).", ge=1)
    zero: Literal[0, 1, 2, 3] = key(
        0,
        "ZeRO stage, which sets what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        derived="3 if `shard` > 1, else 0",
    )
    tp: int = key(1, "Number of tensor parallel ranks.", ge=1)
    sequence: bool = key(
        False,
        "With `tp` > 1: sequence parallelism, in which norms and dropout process only the rank's part of the sequence.",
    )
    pp: int = key(1, "Number of pipeline parallel ranks, each with `stages_per_rank` stages.", ge=1)
    cp: int = key(1, "Number of context parallel ranks, over which each sequence is split.", ge=1)
    context: Literal["auto", "ring", "heads"] = key(
        "auto",
        "Attention between the parts of a sequence: `ring` sends keys and values from rank to rank; `heads` exchanges tokens "
        "for heads, whose number `cp` must divide; `auto` is `heads` where possible.",
    )
    ep: int = key(1, "Number of expert parallel ranks; must divide shard x cp.", ge=1)
    expert_migration: float = key(
        0.0,
        "Move experts between the ranks of `ep` when the busiest rank gets more than this multiple of the mean number of tokens, "
        "such as 1.3; 0 never moves any. The results do not change.",
        ge=0,
    )
    expert_check_every: int = key(50, "With `expert_migration`: steps between two checks.", ge=1)
    expert_checks: int = key(2, "With `expert_migration`: checks in a row that must find the imbalance.", ge=1)
    expert_cooldown: int = key(
        100, "With `expert_migration`: least number of steps between two moves in a layer.", ge=0
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = key(
        "1f1b", "Pipeline schedule: the order of the forward and backward passes of the micro-batches."
    )
    stages_per_rank: int = key(
        1,
        "Pipeline stages per rank; more than one requires schedule `interleaved` or `zero_bubble`.",
        derived='2 with `schedule = "interleaved"`, else 1',
        ge=1,
    )
    balance: Literal["measured", "parameters", "even"] = key(
        "measured",
        "What to balance when blocks are assigned to pipeline stages: `measured`, their run time on rank 0; `parameters`, their "
        "number of parameters; `even`, the number of blocks.",
    )
    wrap_parameters: int = key(
        1_000_000, 'With `wrap = "size"`: minimum number of parameters of a module that is gathered separately.', ge=1
    )
    wrap_classes: list[str] = key(
        None,
        'With `wrap = "classes"`: names of the classes of modules that are gathered separately.',
        default_factory=list,
    )
    wrap_function: str = key(
        "",
        'With `wrap = "function"`: called with the name of each module and the module; returns whether it is gathered '
        "separately.",
        form='"package.module:function"',
    )
    wrap: Literal["blocks", "size", "classes", "function"] = key(
        "blocks",
        "The unit in which sharded parameters are gathered: `blocks` of the model, or other modules: by `size`, those with at "
        "least `wrap_parameters` parameters; `classes`, those of `wrap_classes`; `function`, those that `wrap_function` chooses.",
    )
    gather_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Data type in which sharded parameters are gathered and used; `as_is` is the stored type."
    )
    reduce_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Data type in which gradients of sharded parameters are reduced; `as_is` is the gradients' own type."
    )
    output_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Data type to which a sharded model converts its outputs; `as_is` is the type of the last computation."
    )
    buffer_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is",
        "Data type of floating-point buffers, such as running means; `as_is` is the type that the model creates.",
    )
    unused_parameters: bool = key(
        False, "Find parameters without a gradient in every step, for models that do not always use all parameters."
    )
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["measured", "planned"] = key(
        DDP_BUCKET_MB,
        "Bucket size in MiB for the gradient all-reduce of replicas. `measured` tries several sizes before the first step, "
        "`planned` computes one for each bucket from the times of a backward pass and of two all-reduces; a later attempt may "
        "choose others, which changes the last bits of the sums.",
        form='a number above 0, "measured" or "planned"',
    )
    overlap: bool = key(
        True,
        "Reduce gradients of replicas during the backward pass; `false` makes it wait for each bucket, for comparison.",
    )
    reduction: Literal["auto", "flat", "hierarchical", "measured"] = key(
        "auto",
        "Algorithm of the gradient all-reduce. `auto` is `hierarchical` on several nodes with several ranks each. `measured` "
        "measures the links for a few seconds and chooses (CPU only; later attempts on the same nodes reuse the result).",
    )
    placement: Literal["auto", "launched"] = key(
        "auto",
        "Assignment of ranks to positions in the mesh. `auto` groups them by NVLink cliques, nodes and leaf switches if that is "
        "predicted to be faster; `launched` keeps the order in which they were launched.",
    )

    @field_validator("wrap")
    @classmethod
    def _wrapped_by_something(cls, wrap: str, info: ValidationInfo) -> str:
        name = f"wrap_{wrap}"
        if info.data.get(name) in ("", []):
            raise refuse_value((), f"{wrap!r} requires parallel.{name}", f"set parallel.{name}")
        return wrap

    @property
    def model_ranks(self) -> int:
        """The number of ranks that share one replica of the model."""
        return self.pp * self.shard * self.cp * self.tp

    def sizes(self, ranks: int) -> dict[str, int]:
        """Return the size of each mesh dimension in mesh order, then `ep`; `replicate` 0 is derived from `ranks`."""
        replicate = self.replicate or max(1, ranks // self.model_ranks)
        return {"pp": self.pp, "replicate": replicate, "shard": self.shard, "cp": self.cp, "tp": self.tp, "ep": self.ep}


SEVERAL_STAGES = ("interleaved", "zero_bubble")  # schedules that support several stages per rank


def no_micro_batches(parallel: ParallelTable, number: int) -> str:
    """Return why a pipeline cannot run `number` micro-batches per step; "" if it can."""
    amount = f"{number} micro-batch{'' if number == 1 else 'es'} per step"
    if number < parallel.pp:
        return f"{amount}: a pipeline of {parallel.pp} ranks requires at least {parallel.pp}"
    rounds = number // parallel.pp
    if parallel.schedule in SEVERAL_STAGES and number % rounds:
        return f'{amount} are not divisible by {rounds} rounds ({parallel.pp} ranks, schedule "{parallel.schedule}")'
    return ""


def fitting_micro_batch(parallel: ParallelTable, share: int, wanted: int) -> int:
    """Return the micro-batch size closest to `wanted` that fits `share` samples per rank and step; 0 if none fits."""
    fits = [size for size in range(1, share + 1) if share % size == 0 and not no_micro_batches(parallel, share // size)]
    return min(fits, key=lambda size: (abs(size - wanted), size), default=0)


def micro_batch_fix(parallel: ParallelTable, share: int, wanted: int, data_ranks: int) -> str:
    """Return a fix with settings that fit `share` samples per rank; `wanted` is the current `train.micro_batch`."""
    size = fitting_micro_batch(parallel, share, wanted or share)
    if size:
        return f"set micro_batch = {size}"
    size = max(1, wanted)
    present = share // size
    fits = [number for number in range(1, present + 2 * parallel.pp) if not no_micro_batches(parallel, number)]
    number = min(fits, key=lambda number: (abs(number - present), number))
    return f"set batch = {data_ranks * number * size} and micro_batch = {size}"
