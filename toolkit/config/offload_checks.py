"""Reject settings that cannot be combined with `train.offload`."""

from toolkit.config.train import ParallelTable, TrainTable
from toolkit.errors import ToolkitError

__all__ = ["check_offload"]


def check_offload(train: TrainTable, parallel: ParallelTable, ranks: int | None = None) -> None:
    """Reject settings that the trainer does not support with what is offloaded.

    Args:
        ranks: the number of ranks, if it is known.

    Raises:
        ToolkitError: the message names both settings.
    """
    chosen = train.offloaded
    copies = parallel.shard == 1 and (parallel.replicate > 1 or (ranks or 1) > 1)
    layout = f"tp = {parallel.tp}" if parallel.tp > 1 else f"pp = {parallel.pp}" if parallel.pp > 1 else ""
    refused = {
        "gradients": (
            (bool(layout), layout, "its ranks exchange gradients after the backward pass", "use parallel.shard"),
            (copies, "replicas", "their all-reduce needs the gradients in memory", "set parallel.shard to the number of ranks"),
            (train.precision == "fp16", 'precision = "fp16"', "it inspects all gradients at once", 'use precision = "bf16"'),
            (train.lr_scaling == "adaptive", 'lr_scaling = "adaptive"', "it compares gradients", 'use "linear"'),
        ),
        "parameters": (
            (copies or parallel.shard > 1, "several ranks", "FSDP and DDP expect parameters in memory",
             'use parallel.shard with offload = ["optimizer", "gradients"]'),
            (bool(layout), layout, "its ranks compute with parts of parameters", "use parallel.shard"),
            (train.compile, "compile", "compiled blocks expect their parameters in memory", "set train.compile = false"),
            (train.average_decay > 0, "average_decay", "the average reads all parameters at once", "set it to 0"),
            (train.guard == "roll_back", 'guard = "roll_back"', "it loads all parameters at once", 'use guard = "skip"'),
        ),
        "activations": (
            (train.compile, "compile", "hooks of saved tensors break its graphs", "set train.compile = false"),
            (train.recompute != "none", "recompute", "recomputed blocks keep only their input", 'use recompute = "none"'),
            (parallel.ep > 1, f"ep = {parallel.ep}", "a rank gets other numbers of tokens in each step", 'use offload = "optimizer"'),
            (parallel.pp > 1, f"pp = {parallel.pp}", "stages run several forward passes before a backward pass", "set pp = 1"),
        ),
    }  # fmt: skip
    for name, rules in refused.items():
        for is_met, setting, because, fix in rules:
            if name in chosen and is_met:
                raise ToolkitError(
                    f'offload = "{name}" cannot be combined with {setting}: {because}', where="train.offload", fix=fix
                )
    if train.offload_to and not chosen:
        raise ToolkitError(
            "offload_to has no effect without train.offload",
            where="train.offload_to",
            fix='set train.offload, or offload_to = ""',
        )
    if train.offload_activations_as != "as_is" and "activations" not in chosen:
        raise ToolkitError(
            'offload_activations_as has no effect without offload = "activations"',
            where="train.offload_activations_as",
            fix='add "activations" to train.offload',
        )
