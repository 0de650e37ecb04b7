"""Read a program, such as `train.py`, as a job file whose ranks run it."""

import ast
import os
from pathlib import Path
from typing import Any

from toolkit.config.document import Document
from toolkit.config.job import valid_job_name
from toolkit.errors import ToolkitError
from toolkit.slurm.batch_script import is_batch_script

__all__ = ["NOT_A_JOB", "document_of_program", "is_not_job_file", "is_program", "split_function"]

# What runs a file with this ending; "" for a file that toolkit itself starts as a Python script.
_INTERPRETERS = {".py": "", ".R": "Rscript", ".r": "Rscript", ".jl": "julia"}
NOT_A_JOB = "expected a job file (.toml), a program (.py, .R, .jl or an executable) or a script that starts with `#!`"


def is_program(path: Path) -> bool:
    """Return whether ranks can run a file itself. A file that starts with `#!` is a batch script, as for sbatch."""
    path, function = split_function(path)
    if function or not path.is_file():
        return bool(function) and path.is_file()
    return (path.suffix in _INTERPRETERS and not is_batch_script(path)) or _is_executable(path)


def is_not_job_file(path: Path, *, once: bool) -> bool:
    """Return whether ranks run the file that was submitted as JOB, or a function of it, even if it starts with `#!`."""
    return is_program(path) or (not once and path.suffix != ".toml" and is_batch_script(path))


def split_function(path: Path) -> tuple[Path, str]:
    """Return the file and the function of `train.py:main`; the function is "" for any other path."""
    file, _, function = path.name.rpartition(":")
    return (path.with_name(file), function) if file.endswith(".py") and not path.exists() else (path, "")


def document_of_program(named: Path) -> Document:
    """Return the job that runs a program or the function of a Python file, named after the file.

    Raises:
        ToolkitError: a Python file only defines main(world, config), so that ranks would end at once.
    """
    path, function = split_function(named)
    if path.suffix == ".py" and not function:
        _refuse_function_alone(path)
    entry: str | list[str] = f"{path.name}:{function}" if function else path.name
    if interpreter := _INTERPRETERS.get(path.suffix, ""):
        # Ranks start in the folder of the submission, to which an argument is relative.
        entry = [interpreter, os.path.relpath(path)]
    elif path.suffix != ".py":
        entry = [f"./{path.name}"]
    job: dict[str, Any] = {"name": valid_job_name(path.stem), "entry": entry}
    return Document(path, {"job": job}, {})


def _is_executable(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"\x7fELF"
    except OSError:  # the caller reports that the file cannot be read
        return False


def _refuse_function_alone(path: Path) -> None:
    try:
        module = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        message = f"invalid Python: {getattr(error, 'msg', error)}"
        raise ToolkitError(message, where=f"{path}:{line}" if line else str(path), fix="fix that line") from error
    defined = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    statements = (node for node in module.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    used = {one.id for node in statements for one in ast.walk(node) if isinstance(one, ast.Name)}
    for name, node in defined.items():
        if [one.arg for one in node.args.args[:2]] == ["world", "config"] and not {name, "__name__"} & used:
            raise ToolkitError(
                f"the file defines {name}(world, config) but does not call it", where=f"{path}:{node.lineno}",
                fix=f"write {path.name}:{name} in place of {path.name}",
            )  # fmt: skip
