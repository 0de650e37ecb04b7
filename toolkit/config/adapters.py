"""The table [adapters]: fine-tune a frozen base with low-rank adapters, optionally on quantised weights."""

from typing import TYPE_CHECKING, Literal

from toolkit.config.refusal import refuse
from toolkit.config.table import Table, key

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob

__all__ = ["AdaptersTable", "check_adapters"]

_PATTERNS = 'a list of patterns such as ["*.attention_out", "perceptron_*"]'


class AdaptersTable(Table):
    """Low-rank adapters (LoRA). Patterns match the whole name of a module or its end after a dot."""

    rank: int = key(0, "Rank of the adapters; 0 disables adapters and trains the whole model.", ge=0)
    alpha: float = key(16.0, "Scale of the adapters' outputs: `alpha / rank`.", gt=0)
    rank_stabilized: bool = key(False, "Scale by `alpha / sqrt(rank)` instead (rsLoRA).")
    dropout: float = key(0.0, "Dropout on the inputs of adapters.", ge=0, lt=1)
    targets: list[str] = key(
        None, "Linear layers with an adapter; empty selects those of the blocks.", form=_PATTERNS, default_factory=list
    )
    modules_to_save: list[str] = key(
        None, "Modules trained and saved whole, which `base` may lack.", form=_PATTERNS, default_factory=list
    )
    base: str = key(
        "",
        "The frozen weights: a checkpoint folder, or safetensors (a file or a folder) with the names of the model. In the job "
        "file it is relative to that file, in --set to the current folder. Empty keeps the job's initial values.",
    )
    source: str = key("", "Folder with adapters in peft's format to start from, relative as `base`.")
    quantize: Literal["none", "nf4", "fp4", "int8"] = key(
        "none",
        "Type in which ranks keep the frozen weights of the blocks and targets, whole or split by `parallel.tp`. `nf4` and `fp4` "
        "need `toolkit[quantized]`. Not with `parallel.shard` > 1.",
    )
    double_quantization: bool = key(False, "With `nf4` or `fp4`: quantise the scales, too.")


def check_adapters(resolved: "ResolvedJob") -> None:
    """Raise a ToolkitError for settings that cannot be combined with adapters."""
    adapters, name, message, fix = resolved.adapters, "", "", ""
    if adapters.rank and adapters.quantize != "none" and resolved.parallel.shard > 1:
        name, fix = "adapters.quantize", 'set parallel.shard = 1 (whole replicas) or parallel.tp, or quantize = "none"'
        message = (
            f"shard = {resolved.parallel.shard} would split the packed bytes of {adapters.quantize} weights without their "
            "scales: training would continue with wrong values and without an error"
        )
    elif adapters.rank and resolved.checkpoint.take == "weights":
        name, fix = "checkpoint.take", "set adapters.base to the checkpoint of the base instead of checkpoint.source"
        message = '"weights" loads a whole model, but checkpoints of a run with adapters contain only the adapters'
    elif adapters.rank and resolved.train.average_decay:
        name, fix = "train.average_decay", "set average_decay = 0, or adapters.rank = 0"
        message = "the average would be a second copy of the frozen base in memory and in every checkpoint"
    if name:
        raise refuse(resolved, name, message, fix)
