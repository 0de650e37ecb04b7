"""Run batch jobs on Slurm and MPI clusters, from a job file to a trained and resumed model."""

from typing import TYPE_CHECKING, Any

from toolkit.version import VERSION

if TYPE_CHECKING:
    from toolkit.errors import ToolkitError
    from toolkit.submission.executor import AutoExecutor
    from toolkit.submission.public import list_runs, resume, run, submit
    from toolkit.submission.run_handle import Run, RunFailedError
    from toolkit.world.own_loop import should_save, should_stop
    from toolkit.world.record import record
    from toolkit.world.restart import is_restart, last_progress
    from toolkit.world.step import step

__version__ = VERSION
__all__ = [
    "AutoExecutor",
    "Run",
    "RunFailedError",
    "ToolkitError",
    "is_restart",
    "last_progress",
    "list_runs",
    "record",
    "resume",
    "run",
    "should_save",
    "should_stop",
    "step",
    "submit",
]

# The module of each public name. It is imported on first use, so that `import toolkit` stays fast in every rank.
_MODULES = {
    "AutoExecutor": "toolkit.submission.executor",
    "Run": "toolkit.submission.run_handle",
    "RunFailedError": "toolkit.submission.run_handle",
    "ToolkitError": "toolkit.errors",
    "is_restart": "toolkit.world.restart",
    "last_progress": "toolkit.world.restart",
    "list_runs": "toolkit.submission.public",
    "record": "toolkit.world.record",
    "resume": "toolkit.submission.public",
    "run": "toolkit.submission.public",
    "should_save": "toolkit.world.own_loop",
    "should_stop": "toolkit.world.own_loop",
    "step": "toolkit.world.step",
    "submit": "toolkit.submission.public",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and return the object with this name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(_MODULES[name]), name)
    if name in ("record", "should_save", "should_stop", "step"):  # called in every step
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
