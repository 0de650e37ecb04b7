"""Choose the launcher that starts the ranks of an attempt, and build its command."""

import fnmatch
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import OwnFailureError
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.slurm.batch_script import signal_in
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.launchers import (
    Ranks,
    TerminateSteps,
    find_mpirun,
    launch_local,
    launch_mpirun,
    launch_script,
    launch_srun,
)
from toolkit.supervise.log import say
from toolkit.supervise.mpi_family import family_of_program, mpi_of_program, mpirun_of
from toolkit.supervise.shape import Shape
from toolkit.supervise.symptoms import PMIX_ORDER

__all__ = ["is_unmanaged"]

RANK_MODULE = ["-P", "-m", "toolkit.rank"]
# Containers mount only the package: its parent folder may be a site-packages with binaries for another Python.
PACKAGE_INSIDE = "/opt/toolkit-of-host"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RankCommand:
    """The command that a launcher starts for each rank, with extra srun options and the launcher's environment."""

    program: list[str]
    environment: dict[str, str]
    options: list[str] = field(default_factory=list)


def rank_command(
    job: Mapping[str, Any], run: RunDirectory, environment: Mapping[str, str], base: Mapping[str, str], *,
    launcher: str, python: str = sys.executable,
) -> RankCommand:  # fmt: skip
    """Return the command that starts a rank, inside a container if the job or the site has an image.

    Args:
        environment: the variables for the ranks.
        base: the supervisor's variables. Variables that differ from these must override the values of the image.
        python: the interpreter of ranks outside of containers.

    Raises:
        OwnFailureError: the site has no container runtime, or the launcher cannot start it.
    """
    site, table = job.get("site_container") or {}, job.get("container") or {}
    image = _image_of(job)
    if not image:
        outside = dict(environment)
        if python != sys.executable:  # if staged, ranks find its other programs on PATH
            outside["PATH"] = f"{Path(python).parent}:{environment.get('PATH', '')}"
        return RankCommand([python, *RANK_MODULE], outside)
    inside = _environment_inside(job, environment)
    forced = _forced(job, inside, base)
    mounts = _mounts(job, run, [*(site.get("mounts") or []), *(table.get("mounts") or [])])
    program = [str(table.get("python") or "python3"), *RANK_MODULE]
    options = [str(option) for option in site.get("options") or []]
    folder = str(job["job_directory"])
    if site.get("runtime") == "apptainer":
        binds = [argument for mount in mounts for argument in ("--bind", mount)]
        # Without --no-eval, Apptainer's shell would expand the values of APPTAINERENV_*.
        home = ["--home", inside["HOME"]] if "HOME" in forced else []  # Apptainer ignores APPTAINERENV_HOME
        argv = ["apptainer", "exec", "--no-eval", *options, *binds, *home, "--pwd", folder, image, *program]
        return RankCommand(argv, {**inside, **_against_the_image(forced, inside)})
    if site.get("runtime") == "pyxis" and launcher == "srun":
        of_srun = [
            f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={folder}",
            f"--container-env={','.join(forced)}", *options,
        ]  # fmt: skip
        return RankCommand(program, inside, of_srun)
    raise OwnFailureError(
        f"cannot run the image {image} with container runtime {site.get('runtime')!r} and launcher {launcher!r}",
        fix='set [container] runtime in the site file; "pyxis" works only with srun',
    )


def _image_of(job: Mapping[str, Any]) -> str:
    tables = (job.get("container") or {}, job.get("site_container") or {})
    return next((str(table["image"]) for table in tables if table.get("image")), "")


def _environment_inside(job: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    inside = {**environment, "PYTHONPATH": PACKAGE_INSIDE, "PYTHONNOUSERSITE": "1"}
    chosen = (job.get("env") or {}).get("vars") or {}
    if "PYTHONPATH" in chosen:
        inside["PYTHONPATH"] = f"{PACKAGE_INSIDE}:{chosen['PYTHONPATH']}"
    if "MPI4PY_LIBMPI" not in chosen:  # the site's value is a path on the host; the image has its own MPI
        inside.pop("MPI4PY_LIBMPI", None)
    return inside


def _forced(job: Mapping[str, Any], inside: Mapping[str, str], base: Mapping[str, str]) -> list[str]:
    """Return the names of variables that override the image's: all that the site, the job and the supervisor set."""
    of_job = job.get("env") or {}
    own = {*((job.get("site_env") or {}).get("vars") or {}), *of_job.get("secrets", {})}
    own |= {name for pattern in of_job.get("pass", []) for name in fnmatch.filter(inside, pattern)}
    return sorted(name for name in inside if name in own or base.get(name) != inside[name])


def _against_the_image(forced: list[str], inside: Mapping[str, str]) -> dict[str, str]:
    """Return the APPTAINERENV_* variables that override the image's; reject values that Apptainer would change."""
    for name in forced:
        if "\r\n" in inside[name] or any("\ud800" <= char <= "\udfff" for char in inside[name]):
            raise OwnFailureError(
                f"the variable {name} cannot be passed into the image unchanged: Apptainer removes the CR from CR LF, and "
                "replaces bytes that are not UTF-8",
                fix=f"remove {name} from [env], or write its value to a file",
            )
    return {f"APPTAINERENV_{name}": inside[name] for name in forced if name != "HOME"}


def _mounts(job: Mapping[str, Any], run: RunDirectory, more: list[str]) -> list[str]:
    mounts = [f"{_PACKAGE}:{PACKAGE_INSIDE}/toolkit:ro"]
    for folder in dict.fromkeys([str(run.whole.path), str(job["job_directory"])]):
        if ":" in folder or "," in folder:
            raise OwnFailureError(
                f"the folder {folder!r} cannot be mounted: it contains a colon or a comma",
                fix="choose another folder with --runs, or move the job file",
            )
        mounts.append(f"{folder}:{folder}")
    return [*mounts, *(mount if ":" in mount else f"{mount}:{mount}" for mount in more)]


def is_unmanaged(entry: object) -> bool:
    """Return whether the entry is a script or executable, without toolkit's handlers; False for `file.py:main`."""
    return not (isinstance(entry, str) and ":" in entry)


def has_own_signal(job: Mapping[str, Any]) -> bool:
    """Return whether a script or executable receives a signal that it chose before SIGTERM."""
    return signal_in(job["job"]["sbatch"]) is not None if job["job"].get("once") else bool(job["job"].get("signal"))


def choose_launcher(job: Mapping[str, Any], allocation: Allocation) -> str:
    """Return the launcher: `script` for a batch script, else the site's; `auto` is srun in Slurm, else mpirun or local."""
    if job["job"].get("once"):
        return "script"
    kind = str(job["launcher"].get("kind") or "auto")
    if kind == "srun" and not allocation.in_slurm:
        kind = "auto"
    if kind != "auto":
        return kind
    if allocation.in_slurm:
        return "srun"
    if find_mpirun(str(job["launcher"].get("mpirun") or ""), os.environ):
        return "mpirun"
    say("mpirun not found: starting the ranks one by one, without MPI")
    return "local"


def launch(
    kind: str, job: Mapping[str, Any], shape: Shape, environment: Mapping[str, str], attempt: AttemptDirectory, *,
    python: str = sys.executable, nodes: Sequence[str] = (),
    terminate_steps: TerminateSteps = lambda _guard, _is_over: None,
) -> Ranks:  # fmt: skip
    """Start the ranks of one attempt, with `python` as interpreter if the job has no image.

    `nodes` are those of a heterogeneous job, component by component. `terminate_steps` sends SIGTERM to the steps of a
    batch script, given the process of its guard.
    """
    run = RunDirectory(attempt.path.parents[1])
    if kind == "script":
        has_own_files = run.whole.path not in Path(os.path.realpath("/proc/self/fd/1")).parents
        is_batch = "TOOLKIT_IN_ALLOCATION" not in os.environ
        if is_batch and not has_own_files and "TOOLKIT_LOCAL" not in os.environ:
            environment = {**environment, "TOOLKIT_DEFAULT_LOG": _default_log(environment)}
        return launch_script(
            environment, attempt, [sys.executable, "-E", *RANK_MODULE], copies_output=has_own_files and is_batch,
            terminate_steps=terminate_steps, has_step_signal=bool(environment.get("TOOLKIT_STEP_SIGNAL")),
        )  # fmt: skip
    table = job["launcher"]
    command = rank_command(job, run, environment, os.environ, launcher=kind, python=python)
    own = [*(table.get("options") or []), *(job["job"].get("launcher_options") or [])]
    options = [*map(str, own), *command.options]
    program = str(table.get("mpirun") or "")
    mpi = _mpi_of_entry(job, environment, own) if kind == "srun" else ""
    has_mpi = any(option.startswith("--mpi") for option in options)
    if shape.ranks > 1 and (kind != "srun" or (mpi == "none" and not has_mpi)):
        program = _mpirun_of_entry(kind, job, environment) or program
    if kind == "srun":
        mpi = _mpi_over(nodes, job, mpi)
        return launch_srun(shape, command.environment, attempt, command.program, mpi=mpi, options=options)
    if kind == "mpirun":
        return launch_mpirun(shape, command.environment, attempt, command.program, program=program, options=options)
    return launch_local(shape, command.environment, attempt, command.program)


def _default_log(environment: Mapping[str, str]) -> str:
    """Return the name that sbatch gives the log of a script without --output."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID") if "SLURM_ARRAY_JOB_ID" in environment else ("SLURM_JOB_ID",)
    return f"slurm-{'_'.join(environment[name] for name in names)}.out"


def _mpirun_of_entry(kind: str, job: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the mpirun of the MPI with which a compiled program is linked; "" if the entry is not such a program.

    Raises:
        OwnFailureError: there is none, or the ranks would start without MPI.
    """
    entry = job["job"]["entry"]
    if not isinstance(entry, list) or _image_of(job):
        return ""
    folder = Path(str(job.get("code_directory") or job["job_directory"]))
    family = family_of_program(str(entry[0]), folder, environment)
    if family and kind != "mpirun":
        raise OwnFailureError(
            f"{entry[0]} is linked with {family}, but the launcher {kind!r} starts ranks without MPI",
            fix='set launcher_options = ["--mpi=TYPE"] in [job], or launcher.mpi in the site file, to the type for that MPI '
            "(`srun --mpi=list`)"
            if kind == "srun"
            else 'install an mpirun of that MPI, or set launcher.kind = "mpirun" in the site file',
        )
    configured = str(job["launcher"].get("mpirun") or "")
    return mpirun_of(family, configured, environment, program=str(entry[0])) if family else ""


def _mpi_of_entry(job: Mapping[str, Any], environment: Mapping[str, str], options: Sequence[str]) -> str:
    """Return the value for srun --mpi: that for the MPI with which a compiled program is linked, else the site's."""
    mpi, entry = str(job["launcher"].get("mpi") or ""), job["job"]["entry"]
    if not isinstance(entry, list) or _image_of(job) or any(str(one).startswith("--mpi") for one in options):
        return mpi
    folder = Path(str(job.get("code_directory") or job.get("job_directory") or "."))
    chosen = mpi_of_program(str(entry[0]), folder, environment, mpi)
    if chosen != mpi:
        say(
            f"{entry[0]} is linked with an MPI that does not support --mpi={mpi or '(the default)'}: srun uses --mpi={chosen}"
        )
    return chosen


def _mpi_over(nodes: Sequence[str], job: Mapping[str, Any], mpi: str) -> str:
    """Return `mpi`, the value for srun --mpi; `none` if MPI_Init could not work with it and the ranks do not need MPI.

    For PMIx and pmi2, Slurm (22.05) numbers the nodes of a step by sorted name, but the ranks of a heterogeneous job
    component by component. If these orders differ, MPI_Init fails with PMIx and never returns with pmi2.

    Raises:
        OwnFailureError: the ranks run an unmanaged program with pmi2, which would wait forever.
    """
    are_sorted = list(nodes) == sorted(nodes, key=_as_slurm_sorts)
    if are_sorted or not mpi.startswith("pmi"):
        return mpi
    unsorted = f"the nodes of the components ({', '.join(nodes)}) are not sorted by name"
    if not is_unmanaged(job["job"]["entry"]):
        say(f"{unsorted}, so the ranks start without {'PMIx' if mpi.startswith('pmix') else mpi}")
        return "none"
    if not mpi.startswith("pmix"):
        raise OwnFailureError(f"{unsorted}, so MPI_Init would never return with {mpi}", fix=PMIX_ORDER.fix)
    return mpi


def _as_slurm_sorts(node: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"([0-9]+)", node)]
