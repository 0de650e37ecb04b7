"""Check before submission that the entry of a job exists and measures the metric of `checkpoint.best`."""

import ast
import os
import re
import shlex
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError
from toolkit.slurm.batch_script import is_batch_script

__all__ = ["TRAINING_LOSS", "VALIDATION_LOSS", "check_entry", "files_of_entry", "script_of"]

_FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[^:]*))?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def check_entry(resolved: ResolvedJob) -> None:
    """Check the syntax of `job.entry`, and that its file exists relative to the job file and defines the function.

    The file is parsed but not imported, because an import would run user code, and load torch, on the login node.

    Raises:
        ToolkitError: the syntax is invalid, the file is missing or not executable, or does not define the function.
    """
    entry = resolved.job.entry
    where = resolved.origin("job.entry").place("job.entry")
    if resolved.job.once:
        _check_batch_script(resolved, where)
        return
    if isinstance(entry, list):
        _check_program(resolved.code_folder / entry[0], entry[0], where)
        return
    match = _FILE.fullmatch(entry)
    if match is None:
        if not _MODULE.fullmatch(entry):
            raise ToolkitError(
                f"{entry!r} is not a valid entry",
                where=where,
                fix='write "file.py:main", "file.py", "package.module:main", or a list such as ["./a.out"]',
            )
        return
    function = match["function"]
    if function is not None and not function.isidentifier():
        raise ToolkitError(
            f"{function!r} is not a valid function name", where=where, fix=f'write "{match["file"]}:main"'
        )
    path = resolved.code_folder / match["file"]
    if not path.is_file():
        beside = [one.stem for one in resolved.code_folder.glob("*.py")]
        close = nearest(path.stem, beside)
        fix = f'write "{close[0]}.py"' if close else f"create it, or use a path relative to {resolved.code_folder}"
        raise ToolkitError(f"file {path} not found", where=where, fix=fix)
    if function is not None:
        _check_function(path, function, where)


def _check_batch_script(resolved: ResolvedJob, where: str) -> None:
    entry = resolved.job.entry
    if isinstance(entry, list) or ":" in entry:
        message = f"expected the name of a script without a colon, because of `once`; got {entry!r}"
        raise ToolkitError(message, where=where, fix='write entry = "job.sh"')
    path = resolved.job_directory / entry
    if not is_batch_script(path):
        message = f"{path} does not start with `#!`" if path.is_file() else f"file {path} not found"
        raise ToolkitError(message, where=where, fix="use the path of a script, relative to the job file")


def script_of(resolved: ResolvedJob) -> Path | None:
    """Return the path of the Python file that the entry names; None if it names a module or an executable."""
    is_python = isinstance(resolved.job.entry, str) and not resolved.job.once
    match = _FILE.fullmatch(str(resolved.job.entry)) if is_python else None
    return resolved.code_folder / match["file"] if match else None


def files_of_entry(resolved: ResolvedJob) -> list[str]:
    """Return the files that the entry names inside the job folder, relative to it; [] if it names none there."""
    entry = resolved.job.entry
    if resolved.job.once:  # the run has its own copy of the script, which runs in the folder of the submission
        return []
    if isinstance(entry, list):
        names = [entry[0]] if "/" in entry[0] else []
    elif match := _FILE.fullmatch(entry):
        names = [match["file"]]
    else:
        module = entry.partition(":")[0].replace(".", "/")
        files = (f"{module}.py", f"{module}/__init__.py")
        names = [name for name in files if (resolved.code_folder / name).is_file()]
    inside = [os.path.normpath(name) for name in names if not name.startswith("/")]
    return [name for name in inside if name.partition("/")[0] != ".."]


def _check_program(path: Path, written: str, where: str) -> None:
    """Check an executable with a relative path. The PATH and absolute paths of the nodes cannot be checked here."""
    if "/" not in written or written.startswith("/"):
        return
    if not path.is_file():
        raise ToolkitError(
            f"file {path} not found", where=where, fix="create it, or use a path relative to the job file"
        )
    if not os.access(path, os.X_OK):
        raise ToolkitError(f"{path} is not executable", where=where, fix=f"chmod +x {shlex.quote(str(path))}")


def _check_function(path: Path, function: str, where: str) -> None:
    try:
        module = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ToolkitError(
            f"invalid Python: {getattr(error, 'msg', error)}",
            where=f"{path}:{line}" if line else str(path),
            fix="fix that line",
        ) from error
    names = module_names(module)
    if function not in names and "*" not in names:
        defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        close = nearest(function, defined)
        fix = f'write "{path.name}:{close[0]}"' if close else f"define it, or use one of {', '.join(defined)}"
        raise ToolkitError(
            f"function {function!r} not found in {path}", where=where, fix=fix if defined else "define it there"
        )


def module_names(module: ast.Module) -> set[str]:
    """Return the global names that a module may define; "*" if a star import, `globals` or `exec` may define any."""
    names: set[str] = set()
    below: list[ast.AST] = [module]
    while below:
        node = below.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names assigned in a function or class are not global
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in ("globals", "exec")):
            names.add(node.id if isinstance(node.ctx, ast.Store) else "*")
        below += ast.iter_child_nodes(node)
    return names | {name for node in ast.walk(module) if isinstance(node, ast.Global) for name in node.names}


TRAINING_LOSS = "loss"  # the metric that every `toolkit.train` loop measures


VALIDATION_LOSS = "validation_loss"  # the metric that a `Trainer` measures if train.validate_every > 0


_MEASURES = 4  # the index of `measures` in the positional arguments of `Saves`


_TRAINER_MODULES = ("toolkit.train.trainer",)


_SAVES_MODULES = ("toolkit.train.state.saves", "toolkit.train.saves")  # the second is the path of earlier releases


def check_metric(resolved: ResolvedJob) -> None:
    """Check that the script passes the metric of `checkpoint.best` to `Saves`, or that its `Trainer` measures it.

    The script is only parsed. If its metrics cannot be determined this way, the ranks check the name at run time.

    Raises:
        ToolkitError: the script measures only other metrics; the message names them.
    """
    best, script = resolved.checkpoint.best, script_of(resolved)
    if best in ("", TRAINING_LOSS) or script is None:
        return
    try:
        metrics = _measured(ast.parse(script.read_bytes(), str(script)), validates=resolved.train.validate_every > 0)
    except (SyntaxError, ValueError):  # for example, the script uses the syntax of a newer Python
        return
    if metrics is not None and best not in metrics:
        close = nearest(best, metrics) or metrics
        raise ToolkitError(
            f"{script} does not measure {best!r}, only {', '.join(metrics)}",
            where=resolved.origin("checkpoint.best").place("checkpoint.best"),
            fix=f"write {' or '.join(repr(one) for one in close)}, or "
            + ("set train.validate_every" if best == VALIDATION_LOSS else f"pass Saves(...) a measure named {best!r}"),
        )


def _measured(module: ast.Module, *, validates: bool) -> list[str] | None:
    """Return the metrics that a script measures; None if they cannot be determined from its source."""
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
    """Return the calls of `name` in a script that imports it from one of `modules`."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module in modules]
    ours = {alias.asname or alias.name for node in imports for alias in node.names if alias.name == name}
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ours]


def _measures_of(call: ast.Call) -> list[str] | None:
    """Return the keys of the `measures` argument of a call; None if they are not all literal strings."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return None
    given = [*call.args[_MEASURES:], *(one.value for one in call.keywords if one.arg == "measures")]
    if not given:
        return []
    keys = given[0].keys if isinstance(given[0], ast.Dict) else [None]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return names if len(names) == len(keys) else None
