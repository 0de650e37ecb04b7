"""Run a batch script with the arguments and the environment that sbatch would give it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from toolkit.errors import ToolkitError
from toolkit.slurm.sbatch_options import last_value_of

# The variables that toolkit adds for its own processes; users may set others, such as TOOLKIT_SITE.
_OWN = (
    "TOOLKIT_ATTEMPT", "TOOLKIT_FOREIGN", "TOOLKIT_LAUNCHER", "TOOLKIT_LC_CTYPE", "TOOLKIT_OUTPUTS", "TOOLKIT_RANK",
    "TOOLKIT_RESOLVED_JOB", "TOOLKIT_RUN_DIR", "TOOLKIT_SIGNAL", "TOOLKIT_START",
)  # fmt: skip


def environment_of_script(environ: Mapping[str, str], options: Sequence[str]) -> dict[str, str]:
    """Return the environment of the batch shell, without what toolkit, its directives and Python have added to it."""
    environment = {name: value for name, value in environ.items() if name not in _OWN}
    environment.pop("LC_CTYPE", None)
    if environ.get("TOOLKIT_LC_CTYPE"):
        environment["LC_CTYPE"] = environ["TOOLKIT_LC_CTYPE"]
    if not last_value_of(options, "open-mode"):  # srun would use ours
        environment.pop("SLURM_OPEN_MODE", None)
    if "SLURM_TASK_PID" in environment:
        environment["SLURM_TASK_PID"] = str(os.getpid())
    return environment


def run_batch_script(script: Path, argv: Sequence[str], options: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter in the `#!` line of the script, as the kernel does.

    `options` are the sbatch options of the script.
    """
    with script.open("rb") as stream:
        interpreter, _, argument = stream.readline().removeprefix(b"#!").strip().decode().partition(" ")
    command = [interpreter, *([argument.strip()] if argument else []), str(script), *argv]
    try:
        os.execve(interpreter, command, environment_of_script(os.environ, options))
    except OSError as error:
        raise ToolkitError(
            f"cannot run {interpreter}: {error.strerror}",
            where=f"{script}:1",
            fix="correct the `#!` line of the script",
        ) from error
