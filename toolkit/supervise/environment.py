"""Build the environment of ranks from the job, never from the user's login shell.

The rendered script has already removed every variable that is not on a list; this module adds the job's own variables.
"""

import fnmatch
import hmac
import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.slurm.batch_script import shell_signal, signal_in, signal_number
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.supervise.launch import is_unmanaged
from toolkit.supervise.log import say
from toolkit.supervise.restart_arguments import VARIABLES
from toolkit.supervise.shape import Shape

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def rank_environment(
    base: Mapping[str, str], job: Mapping[str, Any], run: RunDirectory, attempt: AttemptDirectory, *,
    start: int, shape: Shape, launcher: str, ends_at: float, halvings: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Return the environment variables that all ranks share.

    Args:
        base: the environment after the site's modules are loaded.
        job: the resolved job.
        ends_at: the end of the allocation in seconds since the epoch, 0 without a time limit.
        halvings: how often the ranks halve their micro-batch (`restart.out_of_memory`).
    """
    # bash cannot unset names such as `foo-bar`. The script kept only the exported functions of a module system.
    is_script = bool(job["job"].get("once"))
    environment = {
        name: value
        for name, value in base.items()
        if is_script or _NAME.fullmatch(name) or name.startswith("BASH_FUNC_")
    }
    is_started_here = any(base.get(name) for name in ("TOOLKIT_LOCAL", "TOOLKIT_IN_ALLOCATION"))  # not by sbatch
    # The first ones are for the supervisor only; `toolkit submit` inside a rank must not read them.
    for name in ("TOOLKIT_START", "TOOLKIT_LOCAL", "TOOLKIT_IN_ALLOCATION", *VARIABLES):
        environment.pop(name, None)
    if first_task := int(environment.pop("TOOLKIT_FIRST_TASK", "0")):
        environment["SLURM_ARRAY_TASK_ID"] = str(first_task + int(environment["SLURM_ARRAY_TASK_ID"]))
    for name in _variables_of_channels(job):
        environment.pop(name, None)  # ranks do not need the URLs of [notify]
    environment |= {
        "TOOLKIT_RUN_DIR": str(run.path),
        "TOOLKIT_ATTEMPT": str(attempt.number),
        "TOOLKIT_RESOLVED_JOB": str(run.start(start) / "job.json"),
        "TOOLKIT_LAUNCHER": launcher,
        "TOOLKIT_FOREIGN": str(int(is_unmanaged(job["job"]["entry"]))),  # 1: the guard maps SIGUSR2 to SIGTERM
        "TOOLKIT_SIGNAL": _signal_of(job),
        "TOOLKIT_STEP_SIGNAL": _signal_of_steps(job) if is_script else "",
    }
    if is_script:  # `rank.entry` removes the variables above
        folder = last_value_of(job["job"]["sbatch"], "chdir", "D") if is_started_here else ""
        environment |= {"TOOLKIT_CHDIR": folder} if folder else {}
        environment |= _exported(last_value_of(job["job"]["sbatch"], "export"), base) if is_started_here else {}
        environment |= {"SLURM_SUBMIT_DIR": os.getcwd()} if base.get("TOOLKIT_LOCAL") else {}  # noqa: PTH109
        return environment | {str(k): str(v) for k, v in (_table(job, "env").get("vars") or {}).items()}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "TOOLKIT_WORLD_SIZE": str(shape.ranks),
        "TOOLKIT_RANKS_PER_NODE": ",".join(str(one.ranks_per_node) for one in shape.components),
        "TOOLKIT_ENDS_AT": f"{ends_at:.0f}",
        "TOOLKIT_HALVINGS": str(halvings),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),  # torch prefixes the keys of its store with it
    }
    if run.secret.exists():  # not in runs of older versions
        # Only the owner of the run can name keys of the store. Ranks get no file that could differ between nodes.
        message = f"store {run.run_id} {attempt.number}".encode()
        environment["TOOLKIT_STORE_PREFIX"] = hmac.new(run.secret.read_bytes(), message, "sha256").hexdigest()[:32]
    library = _table(job, "launcher").get("libmpi") or ""
    if library:
        environment["MPI4PY_LIBMPI"] = str(library)
    environment |= {str(k): str(v) for k, v in (_table(job, "network").get("vars") or {}).items()}
    environment |= {str(k): str(v) for k, v in (_table(job, "env").get("vars") or {}).items()}
    environment |= _interface_of_open_mpi(str(_table(job, "network").get("interface") or ""), environment)
    chosen = _allocators(_table(job, "env"))
    # torch accepts the older name, too, and merges nothing.
    if "PYTORCH_CUDA_ALLOC_CONF" in environment and chosen.pop("PYTORCH_ALLOC_CONF", ""):
        say("[env] expandable_segments has no effect: the environment sets PYTORCH_CUDA_ALLOC_CONF")
    for name in chosen.keys() & environment.keys():
        say(f"{name}={environment[name]} of the environment overrides {chosen[name]} of [env]")
    return chosen | environment


def _interface_of_open_mpi(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Open MPI use one interface; MPICH ignores them.

    Open MPI ends a job that both includes and excludes interfaces, so what the user or the site has set remains alone.
    """
    programs = [environment.get("MPI4PY_LIBMPI"), shutil.which("mpirun", path=environment.get("PATH"))]
    folders = [Path(path).resolve().parent.parent / "etc" for path in programs if path] + [Path("/etc/openmpi")]
    files = [Path(environment.get("HOME", "/"), ".openmpi/mca-params.conf")]
    set_there = ""
    for path in [*files, *(folder / "openmpi-mca-params.conf" for folder in folders)] if interface else []:
        with suppress(OSError):  # most of them do not exist
            set_there += path.read_text(encoding="utf-8", errors="replace")
    return {
        f"{name}_include": interface
        for name in ("OMPI_MCA_btl_tcp_if", "OMPI_MCA_oob_tcp_if", "PRTE_MCA_prte_if")
        if interface and not {f"{name}_include", f"{name}_exclude"} & environment.keys()
        if not re.search(rf"^\s*{name.partition('MCA_')[2]}_(?:in|ex)clude\s*=", set_there, re.MULTILINE)
    }


def _allocators(env: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of the allocators that the job selects."""
    glibc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    chosen = glibc if env.get("malloc") == "trimmed" else {}
    return chosen | ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if env.get("expandable_segments") else {})


def _exported(value: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `sbatch --export=VALUE` sets; all others of the shell are kept, as sbatch does for ALL."""
    exported: dict[str, str] = {}
    for part in re.findall(r"""(?:[^,'"]|'[^']*'|"[^"]*")+""", value):
        name, equals, one = (part[1:-1] if part[0] in "'\"" and part[-1] == part[0] else part).partition("=")
        if equals:
            exported[name] = one
        elif name.upper() == "ALL":
            exported |= {name: base[name] for name in exported if name in base}
    return exported


def _signal_of(job: Mapping[str, Any]) -> str:
    """Return the number of the signal that the job requests before the walltime; "" if there is none."""
    table = job["job"]
    if table.get("once"):
        own = shell_signal(table["sbatch"])
        return str(own[0]) if own else ""
    name = str(table.get("signal") or "")
    return str(signal.Signals[f"SIG{name}"].value) if name else ""


def _signal_of_steps(job: Mapping[str, Any]) -> str:
    """Return the number of the signal that a batch script requests for its steps; "" if there is none."""
    options = job["job"]["sbatch"]
    own = signal_number(signal_in(options))
    return str(own) if own and not signal_in(options, only_shell=True) else ""


def _variables_of_channels(job: Mapping[str, Any]) -> list[str]:
    names = re.findall(r'"(?:\w+:)?env:(\w+)"', json.dumps(_table(job, "notify")))
    needed = [*(_table(job, "env").get("pass") or ()), *(_table(job, "env").get("secrets") or ())]
    return [name for name in names if not any(fnmatch.fnmatchcase(name, one) for one in needed)]


def _table(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = job.get(name)
    return table if isinstance(table, Mapping) else {}
