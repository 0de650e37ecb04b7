"""Keys that have no effect unless another key has a certain value: such a key is rejected where it is set."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args

from toolkit.config.document import Layer, Origin
from toolkit.config.gradient_compression import GradientCompressionTable, is_used
from toolkit.config.resolved import ResolvedJob, as_json
from toolkit.config.table import Table
from toolkit.errors import ToolkitError, all_of

__all__ = ["check_needs", "default_of"]

_LAYERS = get_args(Layer)


@dataclass(frozen=True)
class Need:
    """Unless `met(table)`, `keys` of `table` have no effect; `others` are the keys that `met` reads; `fix` sets one."""

    table: str
    keys: tuple[str, ...]
    others: tuple[str, ...]
    met: Callable[[Any], bool]
    fix: str


_MODEL = ("shard", "tp", "pp")

# Keys of [gradient_compression] that only some algorithms use, with one of these.
_OF_ALGORITHMS = {
    "block": "int8", "rounding": "int8", "levels": "qsgd", "density": "top_k", "threshold": "threshold", "rank": "powersgd",
    "momentum": "ef21", "policy": "auto",
}  # fmt: skip
_OF_RESIDUALS = ("residual_type", "residual_decay", "residual_saved")


def _is_used_or_none(table: GradientCompressionTable, key: str) -> bool:
    return table.algorithm == "none" or is_used(table, key)  # all keys need an algorithm, which a row of its own says


NEEDS = (
    Need("train", ("lr_reference_batch",), ("lr_scaling",), lambda it: it.lr_scaling != "none", 'lr_scaling = "linear"'),
    Need("train", ("min_lr_ratio",), ("schedule",), lambda it: it.schedule != "constant", 'schedule = "cosine"'),
    Need("train", ("compile_mode",), ("compile",), lambda it: it.compile, "compile = true"),
    Need("train", ("betas", "eps"), ("optimizer",), lambda it: it.optimizer != "sgd", 'optimizer = "adamw"'),
    Need("train", ("momentum",), ("optimizer",), lambda it: it.optimizer in ("sgd", "muon"), 'optimizer = "sgd" or "muon"'),
    Need("train", ("recompute_every",), ("recompute",), lambda it: it.recompute == "every", 'recompute = "every"'),
    Need("train", ("recompute_above_mb",), ("recompute",), lambda it: it.recompute == "large", 'recompute = "large"'),
    Need("train", ("activation_budget_gb",), ("recompute",), lambda it: it.recompute == "budget", 'recompute = "budget"'),
    Need(
        "train", ("guard_deviations", "guard_window", "guard_limit"), ("guard",), lambda it: it.guard != "off",
        'guard = "skip" or "roll_back"',
    ),
    Need(
        "train", ("early_stop_min_delta",), ("early_stop_patience",), lambda it: it.early_stop_patience > 0,
        "early_stop_patience",
    ),
    Need("train", ("profile_from",), ("profile_steps",), lambda it: it.profile_steps > 0, "profile_steps"),
    Need(
        "adapters",
        ("alpha", "rank_stabilized", "dropout", "targets", "modules_to_save", "base", "source", "quantize"),
        ("rank",), lambda it: it.rank > 0, "rank",
    ),
    Need("adapters", ("double_quantization",), ("quantize",), lambda it: "4" in it.quantize, 'quantize = "nf4"'),
    Need(
        "gradient_compression", ("scope", "dense_steps", "min_elements", "error_feedback", *_OF_ALGORITHMS, *_OF_RESIDUALS),
        ("algorithm",), lambda it: it.algorithm != "none", "algorithm",
    ),
    *(
        Need("gradient_compression", (key,), ("algorithm",), partial(_is_used_or_none, key=key), f'algorithm = "{algorithm}"')
        for key, algorithm in _OF_ALGORITHMS.items()
    ),
    Need(
        "gradient_compression", ("rank", *_OF_RESIDUALS), ("policy",), lambda it: it.algorithm != "auto" or it.factorises,
        'policy = "aggressive"',
    ),
    Need(
        "gradient_compression", _OF_RESIDUALS[:2], ("algorithm",), lambda it: it.can_keep_residuals, 'algorithm = "powersgd"',
    ),
    Need(
        "gradient_compression", _OF_RESIDUALS[:2], ("algorithm", "error_feedback"),
        lambda it: it.has_feedback or it.algorithm in ("none", "auto") or not it.can_keep_residuals, 'error_feedback = "on"',
    ),
    Need(
        "gradient_compression", _OF_RESIDUALS[2:], ("algorithm", "error_feedback"), lambda it: it.algorithm in ("none", "auto") or it.has_state,
        'algorithm = "powersgd"',
    ),
    Need("local_sgd", ("every", "fragments"), ("algorithm",), lambda it: it.algorithm != "none", 'algorithm = "average" or "diloco"'),
    Need("local_sgd", ("outer_lr", "outer_momentum"), ("algorithm",), lambda it: it.algorithm == "diloco", 'algorithm = "diloco"'),
    Need("parallel", ("sequence",), ("tp",), lambda it: it.tp > 1, "tp = 2 or more"),
    Need("parallel", ("context",), ("cp",), lambda it: it.cp > 1, "cp = 2 or more"),
    Need("parallel", ("schedule", "stages_per_rank", "balance"), ("pp",), lambda it: it.pp > 1, "pp = 2 or more"),
    Need("parallel", ("wrap_parameters",), ("wrap",), lambda it: it.wrap == "size", 'wrap = "size"'),
    Need("parallel", ("wrap_classes",), ("wrap",), lambda it: it.wrap == "classes", 'wrap = "classes"'),
    Need("parallel", ("wrap_function",), ("wrap",), lambda it: it.wrap == "function", 'wrap = "function"'),
    Need(
        "parallel", ("wrap", "gather_type", "reduce_type", "output_type"), _MODEL, lambda it: it.shard * it.tp * it.pp > 1,
        "shard = 2 or more",
    ),
    Need(
        "parallel", ("bucket_mb", "overlap", "unused_parameters"), _MODEL, lambda it: it.shard * it.tp * it.pp == 1,
        "{other} = 1",
    ),
    Need("parallel", ("reduction",), ("tp", "pp"), lambda it: it.tp * it.pp == 1, "{other} = 1"),
    Need("job", ("signal", "ranks"), ("entry",), lambda it: isinstance(it.entry, list) or ":" not in it.entry, 'entry = "file.py"'),
    Need("data", ("prefetch",), ("workers",), lambda it: it.workers != 0, 'workers = "auto"'),
    Need("data", ("broken_limit",), ("broken",), lambda it: it.broken == "skip", 'broken = "skip"'),
)  # fmt: skip


def check_needs(resolved: ResolvedJob, anew: frozenset[str] | None = None) -> None:
    """Reject keys that were set but have no effect; of a job that was checked before only the keys `anew`, which override its own.

    Raises:
        ToolkitError: the message names every such key and the setting that it requires.
    """
    errors = [_refusal(need, key, resolved) for need, key in _unmet(resolved, anew)]
    if errors:
        raise all_of(errors)


def _unmet(resolved: ResolvedJob, anew: frozenset[str] | None) -> Iterator[tuple[Need, str]]:
    for need in NEEDS:
        table: Table = getattr(resolved, need.table)
        if need.met(table):
            continue
        of_others = [resolved.origin(f"{need.table}.{other}") for other in need.others]
        for key in need.keys:
            name = f"{need.table}.{key}"
            if getattr(table, key) == default_of(type(table), key) or (anew is not None and name not in anew):
                continue
            if not any(_outranks(one, resolved.origin(name)) for one in of_others):
                yield need, key


@cache  # a sweep with a thousand tasks reads every default a thousand times
def default_of(table: type[Table], key: str) -> Any:
    """Return the default of a key."""
    return table.model_fields[key].get_default(call_default_factory=True)


def _outranks(other: Origin, own: Origin) -> bool:
    return _LAYERS.index(other.layer) > _LAYERS.index(own.layer)


def _refusal(need: Need, key: str, resolved: ResolvedJob) -> ToolkitError:
    table: Table = getattr(resolved, need.table)
    telling = [other for other in need.others if getattr(table, other) != default_of(type(table), other)] or need.others
    condition = " and ".join(f"{other} = {as_json(getattr(table, other))}" for other in telling)
    name = f"{need.table}.{key}"
    return ToolkitError(
        f"{as_json(getattr(table, key))} has no effect with {condition}",
        where=resolved.origin(name).place(name),
        fix=f"set {need.fix.format(other=telling[0])}, or remove {key}",
    )
