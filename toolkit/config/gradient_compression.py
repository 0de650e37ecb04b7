"""The table [gradient_compression]: how ranks compress the gradients that they exchange, and what that excludes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from toolkit.config.table import Table, key
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.config.resolved import ResolvedJob

__all__ = ["ALGORITHMS", "GradientCompressionTable", "check_gradient_compression", "is_used"]


@dataclass(frozen=True)
class AlgorithmFacts:
    """The keys that an algorithm uses and others do not, and whether it uses error feedback by default; None if it cannot.

    `suits_adam` is False if its error feedback makes the results of Adam worse.
    """

    keys: tuple[str, ...] = ()
    feedback: bool | None = False
    suits_adam: bool = True


ALGORITHMS = {
    "bf16": AlgorithmFacts(),
    "fp16": AlgorithmFacts(),
    "int8": AlgorithmFacts(("block", "rounding")),
    "int4": AlgorithmFacts(("block", "rounding")),
    "qsgd": AlgorithmFacts(("block", "levels"), feedback=None),
    "terngrad": AlgorithmFacts(("block",), feedback=None),
    "natural": AlgorithmFacts(),
    "sign": AlgorithmFacts(feedback=None),
    "ef_sign": AlgorithmFacts(("block",), feedback=True, suits_adam=False),
    "one_bit": AlgorithmFacts(("block",), feedback=True, suits_adam=False),
    "top_k": AlgorithmFacts(("density", "momentum"), feedback=True, suits_adam=False),
    "threshold": AlgorithmFacts(("density", "threshold"), feedback=True, suits_adam=False),
    "gaussian_k": AlgorithmFacts(("density",), feedback=True, suits_adam=False),
    "random_k": AlgorithmFacts(("density",), feedback=True, suits_adam=False),
    "bernoulli": AlgorithmFacts(("density",), feedback=True, suits_adam=False),
    "powersgd": AlgorithmFacts(("rank",), feedback=True),
    "ef21": AlgorithmFacts(("density", "momentum"), feedback=None, suits_adam=False),
    "auto": AlgorithmFacts(("block", "rounding", "rank", "policy"), feedback=None),
}
_NO_FEEDBACK = {"ef21": "is itself a form of error feedback", "auto": "uses error feedback for `powersgd` only"}
# Algorithms whose messages for each rank add up to a sum, which FSDP2's reduce-scatter requires.
SCATTERED = ("bf16", "fp16", "int8", "int4", "qsgd", "terngrad", "natural")
_OF_UNITS = ("wrap", "gather_type", "reduce_type", "output_type")


class GradientCompressionTable(Table):
    """Compression of the gradients that replicas exchange (docs/compression.md)."""

    algorithm: Literal[
        "none", "bf16", "fp16", "int8", "int4", "qsgd", "terngrad", "natural", "sign", "ef_sign", "one_bit", "top_k",
        "threshold", "gaussian_k", "random_k", "bernoulli", "powersgd", "ef21", "auto"
    ] = key("none", "How to compress gradients; `none` sends them as they are, `auto` chooses for each bucket by `policy`.")  # fmt: skip
    policy: Literal["bandwidth_aware", "conservative", "aggressive", "loss_aware"] = key(
        "bandwidth_aware",
        "How `auto` chooses: `bandwidth_aware` the fastest of dense, `bf16`, `int8` and `powersgd`, by measured times; "
        "`conservative` always `int8`; `aggressive` `powersgd` for matrices and `int8` for others, after 10 dense steps; "
        "`loss_aware` as `aggressive`, but `int8` while the norm of the gradient changes by more than half in 50 steps.",
    )
    scope: Literal["nodes", "all"] = key(
        "nodes",
        "Which ranks exchange compressed gradients. With `nodes`, replicas of a whole model on nodes with equally many ranks "
        "first average dense ones in each node, except with algorithms that sum or keep state; `all` compresses everything.",
    )
    dense_steps: int = key(0, "Number of first steps without compression.", ge=0)
    min_elements: int = key(4096, "Parameters with fewer elements are not compressed.", ge=1)
    block: int = key(256, "Numbers that share a scale; a multiple of 8.", ge=8, multiple_of=8)
    rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "Rounding of `int8` and `int4`; `stochastic` makes the mean of the rounded numbers exact."
    )
    levels: int = key(7, "Levels of `qsgd` on each side of zero; up to 7 need 4 bits, more need 8.", ge=1, le=127)
    density: float = key(
        0.01, "Share of the numbers that sparse algorithms send; for `threshold` the limit.", gt=0, le=1
    )
    threshold: float = key(1e-3, "Smallest magnitude that `threshold` sends.", gt=0)
    rank: int = key(4, "Rank of the factors of `powersgd`.", ge=1)
    momentum: float = key(0.0, "Momentum of `ef21`, and momentum correction of `top_k`.", ge=0, lt=1)
    error_feedback: Literal["auto", "on", "off"] = key(
        "auto",
        "Whether each rank adds to its next gradient what its messages lost; `auto` as docs/compression.md lists it.",
    )
    residual_type: Literal["fp32", "bf16"] = key("fp32", "Data type in which error feedback keeps what was lost.")
    residual_decay: float = key(1.0, "Factor of the residual at each step, for a gradual decay.", gt=0, le=1)
    residual_saved: Literal["mean", "exact"] = key(
        "mean",
        "What checkpoints contain: the `mean` of the residuals over the ranks, from which any number of ranks resumes, or "
        "also each rank's own (`exact`), from which the same number of ranks resumes to the last bit.",
    )

    @property
    def factorises(self) -> bool:
        """Whether matrices may be sent as products of thin ones."""
        return self.algorithm == "powersgd" or (self.algorithm == "auto" and self.policy != "conservative")

    @property
    def has_feedback(self) -> bool:
        """Whether residuals are kept."""
        default = self.algorithm != "none" and bool(ALGORITHMS[self.algorithm].feedback)
        return {"auto": default, "on": True, "off": False}[self.error_feedback]

    @property
    def can_keep_residuals(self) -> bool:
        """Whether the algorithm permits error feedback, or uses it in part."""
        return self.algorithm in ("none", "auto") or ALGORITHMS[self.algorithm].feedback is not None

    @property
    def has_state(self) -> bool:
        """Whether checkpoints have tensors of the compression."""
        return self.has_feedback or self.factorises or self.algorithm == "ef21"

    @property
    def used_momentum(self) -> float:
        """`momentum`; 0 if the algorithm does not use it, as when a resume has changed the algorithm."""
        return self.momentum if is_used(self, "momentum") else 0.0


def is_used(table: GradientCompressionTable, key: str) -> bool:
    """Return whether the algorithm of `table` uses `key`, one of those that only some algorithms use."""
    return table.algorithm != "none" and key in ALGORITHMS[table.algorithm].keys


def check_gradient_compression(resolved: "ResolvedJob") -> None:
    """Reject settings that cannot be combined with gradient compression.

    Raises:
        ToolkitError: the message names both settings.
    """
    table = resolved.gradient_compression
    if table.algorithm == "none":
        return
    for key_name, is_met, message, fix in _exclusions(resolved):
        if is_met:
            raise ToolkitError(message, where=f"gradient_compression.{key_name}", fix=fix)


def _exclusions(resolved: "ResolvedJob") -> list[tuple[str, bool, str, str]]:
    """Return (key, whether the job has the combination, message, fix)."""
    table, train, parallel = resolved.gradient_compression, resolved.train, resolved.parallel
    name, feedback = table.algorithm, table.has_feedback
    copies = min(parallel.sizes(ranks)["replicate"] for ranks in resolved.rank_counts)
    scatters = parallel.shard > 1 and copies == 1
    return [
        ("algorithm", scatters and name not in SCATTERED,
         f"with shard = {parallel.shard} FSDP2 scatters gradients, but {name} is an exchange of whole gradients",
         f"use one of {', '.join(SCATTERED)}" + (", or parallel.replicate above 1" if name != "powersgd" else "")),
        ("algorithm", scatters and parallel.tp * parallel.pp > 1,
         f"in the reduce-scatter of shard = {parallel.shard}, tensor-parallel ranks and stages would round shared parameters "
         "differently", "set tp = 1 and pp = 1, or parallel.replicate above 1"),
        ("error_feedback", scatters and feedback,
         f"error feedback requires whole gradients, but with shard = {parallel.shard} FSDP2 scatters them",
         'use error_feedback = "off", or parallel.replicate above 1'),
        ("dense_steps", scatters and table.dense_steps > 0,
         f"dense_steps has no effect on the reduce-scatter of shard = {parallel.shard}", "set dense_steps = 0"),
        ("algorithm", copies == parallel.shard == 1 < parallel.tp * parallel.pp,
         "no two ranks have the same part of the model, so that there are no gradients to exchange", 'set algorithm = "none"'),
        ("algorithm", name == "powersgd" and parallel.shard * parallel.tp > 1,
         f"powersgd factorises whole matrices, but with shard = {parallel.shard} and tp = {parallel.tp} a rank has parts of them",
         "use int8 or int4"),
        ("algorithm", copies > 1 == parallel.shard < parallel.tp * parallel.pp and any(
            getattr(parallel, one) != type(parallel).model_fields[one].default for one in _OF_UNITS),
         f"{', '.join(_OF_UNITS)} belong to FSDP2, which does not reduce compressed gradients without shard", "remove them"),
        ("algorithm", scatters and name in ("bf16", "fp16") and parallel.reduce_type == "bf16",
         f'reduce_type = "bf16" sends as few bytes as {name}', 'remove one of them, or use algorithm = "int8"'),
        ("algorithm", name == "auto" and parallel.tp * parallel.pp > 1,
         "tensor-parallel ranks and stages, which share parameters, could choose different algorithms", "use int8"),
        ("algorithm", parallel.cp > 1 and parallel.shard * parallel.tp * parallel.pp > 1,
         f"cp = {parallel.cp} averages gradients together with the shards or stages", "set cp = 1"),
        ("algorithm", parallel.ep > 1, f"ep = {parallel.ep} averages the gradients of experts over other ranks", "set ep = 1"),
        ("algorithm", copies > 1 < parallel.shard and "gradients" in train.offloaded,
         "gradients that are offloaded in the backward pass cannot be averaged after it", 'use train.offload = "optimizer"'),
        ("algorithm", parallel.reduction in ("measured", "hierarchical"),
         f'reduction = "{parallel.reduction}" sums gradients in steps between ranks, but compressed gradients have an exchange of '
         "their own", 'set parallel.reduction = "auto"'),
        ("algorithm", train.lr_scaling == "adaptive",
         "AdaScale compares the gradients of micro-batches with their exact mean", 'use lr_scaling = "linear"'),
        ("error_feedback", table.error_feedback != "auto" and ALGORITHMS[name].feedback is None,
         f'"{name}" ' + _NO_FEEDBACK.get(name, "loses more than the gradient has, so that residuals would grow without a limit"),
         'use "auto"'),
        ("error_feedback", feedback and parallel.unused_parameters,
         "error feedback would keep what belongs to parameters without a gradient, which DDP does not update "
         "(parallel.unused_parameters)", 'use error_feedback = "off"'),
        ("policy", name == "auto" and table.policy != "conservative" and parallel.unused_parameters,
         "error feedback of powersgd would keep what belongs to parameters without a gradient (parallel.unused_parameters)",
         'use policy = "conservative"'),
        ("momentum", table.momentum > 0 and name == "top_k" and not feedback,
         "momentum correction accumulates what was not sent, which requires error feedback", "set momentum = 0"),
        ("momentum", table.momentum > 0 and name == "top_k" and not (train.optimizer == "sgd" and train.momentum == 0),
         f'momentum correction replaces the momentum of the optimizer, got optimizer = "{train.optimizer}" with momentum '
         f"{train.momentum}", 'use train.optimizer = "sgd" with train.momentum = 0, or momentum = 0'),
    ]  # fmt: skip
