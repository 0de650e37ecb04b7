"""`AutoExecutor`: submits Python functions as jobs, with the parameter names of submitit."""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.submission.public import JobOptions, nearest_name, request_of
from toolkit.submission.run_handle import Run

__all__ = ["AutoExecutor"]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value) or int(value) < 0:
        raise ValueError
    return int(value)


def _gigabytes(value: Any) -> int:
    return _whole_number(math.ceil(float(value)))


def _duration(value: Any) -> Any:
    return value if isinstance(value, str) else _whole_number(value)


_KINDS: dict[Callable[[Any], Any], str] = {
    _text: "a string", _whole_number: "a whole number of at least 0", _gigabytes: "a number of at least 0",
    _duration: "whole minutes, or a duration of sbatch",
}  # fmt: skip
# submitit parameter: (key of the job file or, without a dot, option of `JobOptions`; function that converts the value).
_PARAMETERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", _text),
    "nodes": ("nodes", _whole_number),
    "timeout_min": ("time", _whole_number),
    "tasks_per_node": ("ranks_per_node", _whole_number),
    "cpus_per_task": ("cpus_per_rank", _whole_number),
    "gpus_per_node": ("gpus_per_node", _whole_number),
    "mem_gb": ("job.mem_gb_per_node", _gigabytes),
    "slurm_job_name": ("name", _text),
    "slurm_nodes": ("nodes", _whole_number),
    "slurm_time": ("time", _duration),
    "slurm_ntasks_per_node": ("ranks_per_node", _whole_number),
    "slurm_cpus_per_task": ("cpus_per_rank", _whole_number),
    "slurm_gpus_per_node": ("gpus_per_node", _whole_number),
    "slurm_partition": ("partition", _text),
    "slurm_account": ("account", _text),
    "slurm_qos": ("qos", _text),
    "slurm_constraint": ("constraint", _text),
    "slurm_nodelist": ("nodelist", _text),
    "slurm_exclude": ("exclude", _text),
}
_OWN = ("slurm_array_parallelism", "slurm_additional_parameters", "slurm_dependency", "slurm_exclusive", "site")


class AutoExecutor:
    """Submits functions of importable modules and of the calling script, with JSON values as arguments and results.

    `folder` is the folder of all runs. Without Slurm, each function runs in the background on this machine.
    """

    def __init__(self, folder: str | Path = "runs", *, site: str | None = None) -> None:
        self.folder = Path(folder)
        self.parameters: dict[str, Any] = {} if site is None else {"site": site}

    def update_parameters(self, **parameters: Any) -> None:
        """Set parameters for later submissions, by their submitit names; an integer time is in minutes.

        Raises:
            ToolkitError: a name is unknown, or a value has the wrong type.
        """
        known = {*_PARAMETERS, *_OWN}
        for name, value in parameters.items():
            if name not in known:
                raise ToolkitError(
                    f"unknown parameter {name!r}", where="AutoExecutor.update_parameters", fix=nearest_name(name, known)
                )
            if name in _PARAMETERS:
                _converted(name, value)
            if name == "slurm_array_parallelism" and value is not None:
                _convert(name, _whole_number, value)
            if name == "slurm_additional_parameters" and not isinstance(value, Mapping | None):
                raise ToolkitError(
                    f"expected a dictionary of sbatch options, got {value!r}", where=name, fix='pass {"mem": "8G"}'
                )
        self.parameters.update(parameters)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Submit one call, and return its run; `result()` returns what the function returned."""
        return self._create(_calls_of(function, [(args, kwargs)]))

    def map_array(self, function: Callable[..., Any], /, *iterables: Iterable[Any]) -> list[Run]:
        """Submit one call per tuple of arguments as one array job, and return one run per task."""
        columns = [list(one) for one in iterables]
        if len({len(column) for column in columns}) > 1:
            raise ToolkitError(
                f"expected argument lists of equal length, got lengths {', '.join(str(len(one)) for one in columns)}",
                where="AutoExecutor.map_array", fix="pass one value per call in each list",
            )  # fmt: skip
        arguments: list[tuple[Sequence[Any], Mapping[str, Any]]] = [(args, {}) for args in zip(*columns, strict=True)]
        if not arguments:
            return []
        calls = _calls_of(function, arguments)
        if not self._has_scheduler():
            return [self._create({**calls, "calls": [call]}) for call in calls["calls"]]
        at_once = self.parameters.get("slurm_array_parallelism")
        array = f"0-{len(arguments) - 1}" + (f"%{_whole_number(at_once)}" if at_once else "")
        whole = self._create(calls, array="0" if len(arguments) == 1 else array)
        return whole.tasks()

    def _has_scheduler(self) -> bool:
        from toolkit.site.load import choose_site

        return choose_site(self.parameters.get("site")).site.scheduler.kind == "slurm"

    def _create(self, calls: Mapping[str, Any], *, array: str = "") -> Run:
        from toolkit.submission.create import create

        template = str(files("toolkit.templates").joinpath("function.toml"))
        options: JobOptions = {"runs": self.folder, "name": _job_name(calls["function"]), **self._options()}
        options["set"] = {"job.entry": [sys.executable, "-m", "toolkit.rank.call"], **(options.get("set") or {})}
        if array:
            options["array"] = array
        return create(request_of(template, options, calls=calls))

    def _options(self) -> JobOptions:
        """Return the parameters as submission options."""
        options: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, value in self.parameters.items():
            if name in _PARAMETERS:
                key, converted = _converted(name, value)
                (settings if "." in key else options)[key] = converted
        words = [_sbatch_word(name, value) for name, value in self._additional().items()]
        if words:
            settings["job.sbatch"] = words
        if dependency := self.parameters.get("slurm_dependency"):
            options["sbatch"] = [f"--dependency={dependency}"]
        if site := self.parameters.get("site"):
            options["site"] = site
        return {**options, "set": settings}  # type: ignore[typeddict-item]

    def _additional(self) -> dict[str, Any]:
        additional = dict(self.parameters.get("slurm_additional_parameters") or {})
        if self.parameters.get("slurm_exclusive"):
            additional["exclusive"] = True
        return additional


def _converted(name: str, value: Any) -> tuple[str, Any]:
    key, convert = _PARAMETERS[name]
    return key, _convert(name, convert, value)


def _convert(name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolkitError(
            f"expected {_KINDS[convert]}, got {value!r}", where=name, fix=f"pass {_KINDS[convert]}"
        ) from error


def _sbatch_word(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option}={value}"


def _job_name(function: str) -> str:
    return (
        "".join(char if char.isascii() and char.isalnum() else "_" for char in function).strip("_")[:64] or "function"
    )


def _calls_of(
    function: Callable[..., Any], arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the content of `calls.json`: where each node finds the function, and the arguments of each task.

    Raises:
        ToolkitError: no other process can find the function, or an argument is not a JSON value.
    """
    from toolkit.rank.result import reason_not_json

    _refuse_while_loading()
    module, script = _place_of(function)
    for number, (args, kwargs) in enumerate(arguments):
        for name, value in (*enumerate(args), *kwargs.items()):
            if reason := reason_not_json(value):
                raise ToolkitError(
                    reason, where=f"{function.__qualname__}, task {number}, argument {name}",
                    fix="pass numbers, strings, lists or dictionaries; write anything else to a file and pass its path",
                )  # fmt: skip
    folder = str(Path(script).parent) if script else ""
    return {
        "schema": 1,
        "module": module,
        "script": script,
        "function": function.__qualname__,
        "path": list(dict.fromkeys(filter(None, [folder, *(str(Path(one or ".").absolute()) for one in sys.path)]))),
        "directory": str(Path.cwd()),
        "calls": [{"args": list(args), "kwargs": dict(kwargs)} for args, kwargs in arguments],
    }


def _refuse_while_loading() -> None:
    """Refuse to submit from top-level code, which a job runs to find its function: each job would submit another."""
    main = sys.modules["__main__"]
    if getattr(main.__spec__, "name", "") != "toolkit.rank.call":
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is not vars(main):
            raise ToolkitError(
                "this submission runs again in each job, which loads the script to find its function",
                where=f"{frame.f_code.co_filename}:{frame.f_lineno}", fix='move it under `if __name__ == "__main__":`',
            )  # fmt: skip
        frame = frame.f_back


def _place_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the module of a function, or "" and the path of the calling script."""
    where = getattr(function, "__qualname__", repr(function))
    fix = "define a function with `def` at the top level of a module or of the script"
    if not inspect.isfunction(function):
        raise ToolkitError(f"expected a function, got {type(function).__name__}", where=where, fix=fix)
    if function.__name__ == "<lambda>":
        raise ToolkitError("expected a function with a name, got a lambda", where=where, fix=fix)
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise ToolkitError(
            "expected a function that returns its result, got a generator or coroutine", where=where, fix=fix
        )
    if "<locals>" in function.__qualname__:
        raise ToolkitError("expected a top-level function, got one inside another function", where=where, fix=fix)
    module = sys.modules.get(function.__module__)
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not function:
        raise ToolkitError(
            f"module {function.__module__} contains a different object with this name",
            where=where,
            fix=fix + ", without a decorator",
        )
    if function.__module__ != "__main__":
        return function.__module__, ""
    script = getattr(module, "__file__", None)
    if not script or not Path(script).is_file():
        raise ToolkitError("expected a function from a file, got an interactive one", where=where, fix=fix)
    return "", str(Path(script).absolute())
