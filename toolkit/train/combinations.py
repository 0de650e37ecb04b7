"""Which settings do not go together: refused before a model is built."""

from __future__ import annotations

from toolkit.config.parallel import ParallelTable
from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError


def check_combinations(train: TrainTable, parallel: ParallelTable) -> None:
    """Refuse what the trainer cannot do on such a mesh.

    Raises:
        ToolkitError: naming the two settings.
    """
    if parallel.pp > 1:
        if train.validate_every:
            raise ToolkitError(
                f"a pipeline of {parallel.pp} ranks cannot be validated: no rank has the whole model",
                where="train.validate_every",
                fix="set train.validate_every = 0, and validate a checkpoint with pp = 1",
            )
        if train.recompute in ("large", "budget"):
            raise ToolkitError(
                f'recompute = "{train.recompute}" measures a whole model, and a rank of a pipeline has some of its blocks',
                where="train.recompute",
                fix='take "every" or "selective"',
            )
    if train.compile and (parallel.tp > 1 or parallel.pp > 1):
        name = "tp" if parallel.tp > 1 else "pp"
        raise ToolkitError(
            f"{name} = {getattr(parallel, name)} and torch.compile do not go together: hooks part the graphs",
            where="train.compile",
            fix=f"set train.compile = false, or {name} = 1",
        )
    if train.lr_scaling == "adaptive" and max(parallel.shard, parallel.tp, parallel.pp, parallel.cp) > 1:
        raise ToolkitError(
            "AdaScale looks at the gradient of each micro-batch, which ranks with parts of a model do not have",
            where="train.lr_scaling",
            fix='take "linear" or "square_root", or copies of the model alone',
        )
    if train.lr_scaling == "adaptive" and train.precision == "fp16":
        raise ToolkitError(
            "AdaScale looks at the gradient of each micro-batch, which fp16 scales",
            where="train.lr_scaling",
            fix='take precision = "bf16"',
        )
