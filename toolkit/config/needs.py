"""Keys that have an effect only together with others: a key that would be accepted and do nothing is rejected.

A value from a higher layer, or from a resume, excuses the keys that need it: with `--set train.guard=off`, the
`guard_window` of a job file is for other runs, and that of an earlier start has had its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from toolkit.config.origins import Layer, Origin
from toolkit.config.resolved import ResolvedJob, as_json
from toolkit.config.table import Table
from toolkit.errors import ToolkitError, all_of

_LAYERS = get_args(Layer)


@dataclass(frozen=True)
class Need:
    """In `table`, `keys` have an effect only if the keys `others` have values that are `met`; `fix` sets one that is."""

    table: str
    keys: tuple[str, ...]
    others: tuple[str, ...]
    met: Callable[[Any], bool]
    fix: str


_MODEL = ("shard", "tp", "pp")

NEEDS = (
    Need("train", ("lr_reference_batch",), ("lr_scaling",), lambda it: it.lr_scaling != "none", 'lr_scaling = "linear"'),
    Need("train", ("min_lr_ratio",), ("schedule",), lambda it: it.schedule != "constant", 'schedule = "cosine"'),
    Need("train", ("betas",), ("optimizer",), lambda it: it.optimizer != "sgd", 'optimizer = "adamw"'),
    Need("train", ("momentum",), ("optimizer",), lambda it: it.optimizer != "adamw", 'optimizer = "sgd" or "muon"'),
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
    Need("parallel", ("sequence",), ("tp",), lambda it: it.tp > 1, "tp = 2 or more"),
    Need("parallel", ("schedule", "stages_per_rank", "balance"), ("pp",), lambda it: it.pp > 1, "pp = 2 or more"),
    Need("parallel", ("wrap_parameters",), ("wrap",), lambda it: it.wrap == "size", 'wrap = "size"'),
    Need(
        "parallel", ("wrap", "gather_type", "reduce_type"), _MODEL, lambda it: it.shard * it.tp * it.pp > 1,
        "shard = 2 or more",
    ),
    Need(
        "parallel", ("bucket_mb", "unused_parameters"), _MODEL, lambda it: it.shard * it.tp * it.pp == 1,
        "{other} = 1",
    ),
    Need("parallel", ("reduction",), ("tp", "pp"), lambda it: it.tp * it.pp == 1, "{other} = 1"),
    Need("data", ("prefetch",), ("workers",), lambda it: it.workers != 0, 'workers = "auto"'),
    Need("data", ("broken_limit",), ("broken",), lambda it: it.broken == "skip", 'broken = "skip"'),
)  # fmt: skip


def check_needs(resolved: ResolvedJob, anew: frozenset[str] = frozenset()) -> None:
    """Reject keys that were set and have no effect; `anew` are those that were set over a record's.

    Raises:
        ToolkitError: the message names all of them, each with what it needs.
    """
    errors = [_refusal(need, key, resolved) for need, key in _unmet(resolved, anew)]
    if errors:
        raise all_of(errors)


def _unmet(resolved: ResolvedJob, anew: frozenset[str]) -> Iterator[tuple[Need, str]]:
    for need in NEEDS:
        table: Table = getattr(resolved, need.table)
        if need.met(table):
            continue
        set_keys = [key for key in need.keys if getattr(table, key) != _default(type(table), key)]
        if not set_keys:
            continue
        of_others = [resolved.origin(f"{need.table}.{other}") for other in need.others]
        others_anew = not anew.isdisjoint(f"{need.table}.{other}" for other in need.others)
        for key in set_keys:
            if others_anew and f"{need.table}.{key}" not in anew:
                continue
            own = resolved.origin(f"{need.table}.{key}")
            if not any(_outranks(one, own) for one in of_others):
                yield need, key


@cache  # each of the thousand tasks of a sweep reads all of them
def _default(table: type[Table], key: str) -> Any:
    """The default of a key, which has no effect if it is written out."""
    return table.model_fields[key].get_default(call_default_factory=True)


def _outranks(other: Origin, own: Origin) -> bool:
    return _LAYERS.index(other.layer) > _LAYERS.index(own.layer)


def _refusal(need: Need, key: str, resolved: ResolvedJob) -> ToolkitError:
    table: Table = getattr(resolved, need.table)
    telling = [other for other in need.others if getattr(table, other) != _default(type(table), other)] or need.others
    condition = " and ".join(f"{other} = {as_json(getattr(table, other))}" for other in telling)
    name = f"{need.table}.{key}"
    return ToolkitError(
        f"{as_json(getattr(table, key))} has no effect with {condition}",
        where=resolved.origin(name).place(name),
        fix=f"set {need.fix.format(other=telling[0])}, or remove {key}",
    )
