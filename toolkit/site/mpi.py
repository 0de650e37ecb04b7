"""Find the MPI library of this host and the srun --mpi plugins that it supports, by querying the library.

The file name does not identify it: MPICH, Intel MPI, MVAPICH and Cray MPICH all provide a libmpi.so.12.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("libmpi.so.40", "libmpi_cray.so.12", "libmpi.so.12")
_ANSWER_S = 10.0
# MPI allows this call before MPI_Init. It runs in a separate process, since loading a library runs its initializers.
_QUERY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
if library.MPI_Get_library_version(text, ctypes.byref(length)):
    sys.exit("MPI_Get_library_version failed")
print(text.value.decode(errors="replace"))
"""
ANY = ("pmix", "cray_shasta", "pmi2")
# (Pattern in the version string, plugins with the most likely first); that of MPICH derivatives contains "MPICH".
_SUPPORTED = (
    (re.compile(r"Open MPI|Open RTE|OpenRTE|Spectrum MPI|PRRTE", re.IGNORECASE), ("pmix",)),
    (re.compile(r"CRAY MPICH", re.IGNORECASE), ("cray_shasta", "pmi2")),
    (re.compile(r"--with-pmix"), ("pmix", "pmi2")),
    (re.compile(r"MPICH|MVAPICH|Intel\(R\) MPI|HYDRA", re.IGNORECASE), ("pmi2",)),
)
_BY_NAME = {"libmpi.so.40": ("pmix",), "libmpi_cray.so.12": ("cray_shasta", "pmi2"), "libmpi.so.12": ("pmi2",)}


@dataclass(frozen=True)
class Mpi:
    """An MPI: `library` is "" if only mpirun is known, `plugins` are all if unknown, `called` is the version string."""

    library: str
    plugins: tuple[str, ...]
    called: str


def find_mpi(environ: Mapping[str, str] = os.environ) -> Mpi | None:
    """Return the MPI of the mpirun on PATH, identified by its library, else by mpirun, else by the file name."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun is None:
        return None
    library = _library_beside(mpirun)
    silence = ""
    if library:
        version, silence = _output_of([sys.executable, "-I", "-c", _QUERY, library], environ)
        if version:
            return Mpi(library, supported_by(version), f"{_first_line(version)} (according to its library)")
    version, _ = _output_of([mpirun, "--version"], environ)
    if (plugins := supported_by(version)) != ANY:
        return Mpi(library, plugins, f"{_first_line(version)} (by `mpirun --version`)")
    if not library:
        return None
    return Mpi(
        library,
        _BY_NAME[Path(library).name],
        f"identified only by its file name (the library reported no version: {silence})",
    )


def supported_by(version: str) -> tuple[str, ...]:
    """Return the srun plugins that an MPI with this version string supports; all plugins if it is unknown."""
    return next((plugins for pattern, plugins in _SUPPORTED if pattern.search(version)), ANY)


def _library_beside(mpirun: str) -> str:
    """Return the library in one of the usual folders next to mpirun; "" if none contains it."""
    prefixes = dict.fromkeys((Path(mpirun).parents[1], Path(mpirun).resolve().parents[1]))
    folders = [prefix / below for prefix in prefixes for below in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    paths = (folder / name for folder in folders for name in _NAMES)
    return next((str(path) for path in paths if path.exists()), "")


def _output_of(argv: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (the output of a program, ""), or ("", the reason for the failure)."""
    try:
        done = subprocess.run(
            argv, env=dict(environ), capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no response within {_ANSWER_S:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if done.returncode or not done.stdout.strip():
        return "", _first_line("\n".join(done.stderr.strip().splitlines()[-1:])) or f"exit code {done.returncode}"
    return done.stdout, ""


def _first_line(text: str) -> str:
    """Return the first line of a version string without builder and date, short enough for a comment after a key."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return re.sub(r"[\s\x00-\x1f\x7f]+", " ", line.partition(", package:")[0]).strip()[:120]
