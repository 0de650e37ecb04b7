"""Find the mpirun, or the type of srun --mpi, that belongs to the MPI library of a compiled program.

Any other one starts N copies of rank 0 of 1.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.errors import OwnFailureError
from toolkit.slurm.cluster import mpi_plugins_in

OPEN_MPI, MPICH = "Open MPI", "MPICH"  # MPICH means all libraries with its ABI and Hydra, such as Intel MPI
QUERY_S = 30.0
_OPEN_MPI_LIBRARY = re.compile(r"libopen-(?:rte|pal)\.so|libmpi\.so\.(?:20|40)\b")
_MPICH_LIBRARY = re.compile(r"libmpi\w*\.so\.12\b|libmpich\w*\.so")
_CRAY_LIBRARY = re.compile(r"libmpi_(?:cray|gnu|intel|nvidia|amd|aocc)\w*\.so\.12\b")
_PMIX_LIBRARY = re.compile(r"libpmix\.so")
_NAMES = ("mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")


def family_of_version(text: str) -> str:
    """Return the MPI that prints `text` for `mpirun --version`; "" if it is unknown."""
    if OPEN_MPI in text or "PRTE" in text.upper():
        return OPEN_MPI
    return MPICH if "HYDRA" in text.upper() or "Intel(R) MPI" in text else ""


def family_of_program(program: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Return the MPI that a program is linked with; "" for a script, or a program without MPI."""
    return _family_in(_libraries_of(program, folder, environment))


def _libraries_of(program: str, folder: Path, environment: Mapping[str, str]) -> str:
    path = str(folder / program) if "/" in program else shutil.which(program, path=environment.get("PATH"))
    return _output_of(["ldd", path], environment) if path is not None else ""


def _family_in(libraries: str) -> str:
    if _OPEN_MPI_LIBRARY.search(libraries):
        return OPEN_MPI
    return MPICH if _MPICH_LIBRARY.search(libraries) else ""


def mpi_of_program(program: str, folder: Path, environment: Mapping[str, str], configured: str) -> str:
    """Return the type of srun --mpi that the MPI of a program supports, if Slurm has it here; else `configured`."""
    libraries = _libraries_of(program, folder, environment)
    family = _family_in(libraries)
    if not family or "I_MPI_PMI_LIBRARY" in environment:  # with it, Intel MPI supports what the user has chosen
        return configured
    supported: tuple[str, ...] = ("pmix",) if family == OPEN_MPI else ("pmi2",)
    if family == MPICH and _CRAY_LIBRARY.search(libraries):
        supported = ("cray_shasta", "pmi2")
    elif family == MPICH and _PMIX_LIBRARY.search(libraries):
        supported = ("pmix", "pmi2")
    if configured.startswith(supported):  # such as pmix_v4
        return configured
    # Versions before 23.11 print the list on stderr.
    listed = mpi_plugins_in(_output_of(["sh", "-c", "exec srun --mpi=list 2>&1"], environment))
    return next((one for one in supported if one in listed), configured)


def mpirun_of(family: str, configured: str, environment: Mapping[str, str], *, program: str) -> str:
    """Return the path of an mpirun of this MPI: the site's, else one on PATH, else one next to the interpreter.

    Raises:
        OwnFailureError: there is none; the ranks would each be rank 0 of 1.
    """
    found = []
    for path in dict.fromkeys(_candidates(configured, environment)):
        other = family_of_version(_output_of([path, "--version"], environment))
        if other == family:
            return path
        found.append(f"{path} ({other or 'unknown'})")
    raise OwnFailureError(
        f"{program} is linked with {family}, but the launchers here are {', '.join(found) or 'none'}",
        fix=f"set launcher.mpirun in the site file to the mpirun of {family}, or add its module to [env] modules",
    )


def _candidates(configured: str, environment: Mapping[str, str]) -> Iterator[str]:
    search = environment.get("PATH", "")
    if configured:
        path = shutil.which(configured, path=search)
        yield from [path] if path else []
        return
    for folder in [*search.split(":"), str(Path(sys.executable).parent)]:
        for name in _NAMES:
            if path := shutil.which(name, path=folder):
                yield path


def _output_of(argv: list[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv, env=dict(environment), capture_output=True, text=True, errors="replace", check=False, timeout=QUERY_S
        )
    except (OSError, subprocess.TimeoutExpired):  # it cannot run here, so it is not the launcher of the program
        return ""
    return done.stdout
