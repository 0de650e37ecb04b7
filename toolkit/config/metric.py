"""The check that the job measures the metric of `checkpoint.best`, as far as its script can be read."""

from __future__ import annotations

import ast

from toolkit.config.entry import script_of
from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError

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
