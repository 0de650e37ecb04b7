"""`python -m toolkit.rank.call`: run one rank of a function that `toolkit.AutoExecutor` submitted."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rank.result import store_result
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory

__all__ = ["main"]


def main() -> int:
    """Call the function with the arguments of this run or array task; return the exit code."""
    from toolkit.rank.entry import record_error

    run = RunDirectory(Path(os.environ["TOOLKIT_RUN_DIR"]))
    attempt, rank = int(os.environ["TOOLKIT_ATTEMPT"]), int(os.environ["TOOLKIT_RANK"])
    try:
        calls: dict[str, Any] = read_json(run.calls)
        for folder in reversed(calls["path"]):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        if Path(calls["directory"]).is_dir():
            os.chdir(calls["directory"])
        call = _call_of(run.task_number or 0, calls["calls"], run.calls)
        value = _function(calls)(*call["args"], **call["kwargs"])
        if rank == 0:
            store_result(run, value, attempt)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the outermost frame of the rank records every error
        code = error.exit_code if isinstance(error, ToolkitError) else 1
        record_error(error, code, run.attempt(attempt).error_file(rank), rank, os.environ)
        return code
    return 0


def _call_of(task: int, calls: list[dict[str, Any]], where: Path) -> dict[str, Any]:
    if task >= len(calls):
        raise ToolkitError(
            f"expected a task from 0 to {len(calls) - 1}, got {task}: the run has {len(calls)} calls", where=str(where),
            fix="set job.array to these tasks",
        )  # fmt: skip
    return calls[task]


def _function(calls: dict[str, Any]) -> Callable[..., Any]:
    """Return the function. A script is not loaded as `__main__`, so code under its `__main__` check does not run."""
    if calls["module"]:
        module = importlib.import_module(calls["module"])
    else:
        path = Path(calls["script"])
        specification = importlib.util.spec_from_file_location(path.stem, path)
        if specification is None or specification.loader is None or not path.is_file():
            raise ToolkitError(
                "Python file not found", where=str(path), fix="move the script to a folder that all nodes share"
            )
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
    found: Any = module
    for name in calls["function"].split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ToolkitError(
            f"function {calls['function']!r} not found",
            where=calls["module"] or calls["script"],
            fix="define it at the top level, outside of any `if` block",
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
