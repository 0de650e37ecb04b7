"""Warn about variables and arguments that do not reach the script of a job."""

import ast
import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.config.entry import script_of
from toolkit.config.resolved import ResolvedJob
from toolkit.runs.record.job import uses_slurm
from toolkit.submission.script import KEPT
from toolkit.supervise.launch import is_unmanaged
from toolkit.terminal.talk import say

# Variables that toolkit sets for every rank.
_SET_FOR_RANKS = re.compile(
    r"(?:TOOLKIT|TORCHELASTIC|OMPI|PMIX?|SLURM|JAX)_.*|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)"
    r"|ROLE_NAME|OMP_NUM_THREADS|PYTHONUNBUFFERED|(?:GLOO|NCCL)_SOCKET_IFNAME"
)


_OF_SLURM = re.compile(r"\$(?:\{(SLURM_\w+)(?!\w|:?[-=+?])|(SLURM_\w+))")  # without a default


def warn_of_unpassed(job: ResolvedJob, environ: Mapping[str, str]) -> None:
    """Warn in one line if the script visibly reads variables that are set in this shell and are not passed."""
    patterns = [*KEPT, *job.env.passed, *job.env.vars, *job.env.secrets, *job.site_env.vars, *job.network.vars]
    names = [
        name
        for name in dict.fromkeys(_variables_read(python_file(job)))
        if name in environ and not _SET_FOR_RANKS.fullmatch(name)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if names:
        listed = ", ".join(f'"{name}"' for name in names)
        say(
            f"warning: the script reads {', '.join(names)}, set in this shell but not for the ranks. "
            f"Fix: write pass = [{listed}] into [env], or use [env.secrets] for a secret"
        )


def warn_of_args(job: ResolvedJob) -> None:
    """Warn in one line if [args] is set for a script or program, which does not receive it."""
    names = [key.removeprefix("args.") for key in job.origins if key.startswith("args.")]
    if names and is_unmanaged(job.job.entry):
        say(
            f"warning: the entry is not a `file.py:function`, so it does not receive {', '.join(names)} of [args]. "
            "Fix: pass arguments after `--`, or in job.argv"
        )


def warn_of_slurm(job: ResolvedJob) -> None:
    """Warn in one line if a script that runs without Slurm reads variables that only Slurm sets."""
    script = job.job_directory / str(job.job.entry)
    if not job.job.once or uses_slurm(job) or not script.is_file():
        return
    text = script.read_text(encoding="utf-8", errors="replace")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.lstrip()[:1] != "#"]
    first = {match[1] or match[2]: number for number, line in reversed(lines) for match in _OF_SLURM.finditer(line)}
    own = {"SLURM_SUBMIT_DIR", *re.findall(r"\b(SLURM_\w+)=", text)}
    if names := [f"{name} (line {number})" for name, number in first.items() if name not in own]:
        say(f"warning: {script.name} reads {', '.join(names)}, which only Slurm sets. Fix: write ${{NAME:-DEFAULT}}")


def python_file(job: ResolvedJob) -> Path | None:
    """Return the Python file that the ranks run, also as an argument of a program; None if there is none."""
    entry = job.job.entry
    if isinstance(entry, str):
        return script_of(job)
    files = (job.code_folder / argument for argument in entry[1:] if argument.endswith(".py"))
    return next((file for file in files if file.is_file()), None)


def parse_script(script: Path | None) -> ast.Module:
    """Return the syntax tree of a script, which is empty if there is none, or if it cannot be parsed."""
    try:
        return ast.parse(script.read_bytes()) if script is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):  # for example, the script uses the syntax of a newer Python
        return ast.Module([], [])


def _variables_read(script: Path | None) -> Iterator[str]:
    """Yield the names in os.environ["X"], os.environ.get("X") and os.getenv("X"); without a script, none."""
    for node in ast.walk(parse_script(script)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _ends(node.value, "environ"):
            argument: ast.AST | None = node.slice
        elif isinstance(node, ast.Call) and node.args and _reads(node.func):
            argument = node.args[0]
        else:
            continue
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _reads(function: ast.expr) -> bool:
    """Return whether a call of `function` returns the value of a variable."""
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return _ends(function.value, "environ")
    return _ends(function, "getenv")


def _ends(node: ast.expr, name: str) -> bool:
    """Return whether an expression is `name` or `os.name`."""
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
