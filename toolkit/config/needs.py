"""Keys that have an effect only together with others: a key that would be accepted and do nothing is rejected.

A value from a higher layer, or from a resume, excuses the keys that need it: with `--set train.guard=off`, the
`guard_window` of a job file is for other runs, and that of an earlier start has had its effect.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from toolkit.config.document import Layer, Origin
from toolkit.config.entry import script_of
from toolkit.config.resolved import ResolvedJob, as_json
from toolkit.config.table import Table, nearest
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


TRAINING_LOSS = "loss"  # what the loop of `toolkit.train` measures on its own
VALIDATION_LOSS = "validation_loss"  # what its trainer measures if it validates
_MEASURES = 4  # the position of `measures` among the arguments of `Saves`
_TRAINER_MODULES = ("toolkit.train.trainer",)
_SAVES_MODULES = ("toolkit.train.state.saves", "toolkit.train.saves")  # the second is the path of earlier releases


def check_metric(resolved: ResolvedJob) -> None:
    """Compare the metric with those that the entry's script passes to `Saves`, or a `Trainer` has.

    Nothing is imported or run here, so metrics that a script sets in another form, or elsewhere, are left to the ranks.

    Raises:
        ToolkitError: the script measures only others; the message names them.
    """
    best, script = resolved.checkpoint.best, script_of(resolved)
    if best in ("", TRAINING_LOSS) or script is None:
        return
    try:
        metrics = _measured(ast.parse(script.read_bytes(), str(script)), validates=resolved.train.validate_every > 0)
    except (SyntaxError, ValueError):  # for example Python of another version
        return
    if metrics is not None and best not in metrics:
        close = nearest(best, metrics) or metrics
        raise ToolkitError(
            f"{script} does not measure {best!r}, only {', '.join(metrics)}",
            where=resolved.origin("checkpoint.best").place("checkpoint.best"),
            fix=f"write {' or '.join(repr(one) for one in close)}, or "
            + ("set train.validate_every" if best == VALIDATION_LOSS else "pass Saves(...) a measure of that name"),
        )


def _measured(module: ast.Module, *, validates: bool) -> list[str] | None:
    """The metrics that a script can save by; None if it is not clear from the script."""
    metrics = [TRAINING_LOSS]
    trainers = _calls(module, _TRAINER_MODULES, "Trainer")
    if trainers and validates:
        metrics.append(VALIDATION_LOSS)
    saves = _calls(module, _SAVES_MODULES, "Saves")
    for call in saves:
        names = _measures_of(call)
        if names is None:
            return None
        metrics += [name for name in names if name not in metrics]
    return metrics if saves or trainers else None


def _calls(module: ast.Module, modules: tuple[str, ...], name: str) -> list[ast.Call]:
    """The script's calls of `name`, imported from one of `modules`."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module in modules]
    ours = {alias.asname or alias.name for node in imports for alias in node.names if alias.name == name}
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ours]


def _measures_of(call: ast.Call) -> list[str] | None:
    """The keys of one call's `measures` if they are literal strings; None otherwise."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return None
    given = [*call.args[_MEASURES:], *(one.value for one in call.keywords if one.arg == "measures")]
    if not given:
        return []
    keys = given[0].keys if isinstance(given[0], ast.Dict) else [None]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return names if len(names) == len(keys) else None
