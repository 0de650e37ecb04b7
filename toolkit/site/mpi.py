"""Which MPI this host has, and which of srun's plugins it speaks: as the library says itself, and not as its file is named.

Two libraries of one name may be different ones: libmpi.so.12 is MPICH's, Intel's, MVAPICH's and Cray's.
"""

from __future__ import annotations

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
# The standard lets it be asked before MPI_Init. A process of its own, since loading a library runs what is in it.
_ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
if library.MPI_Get_library_version(text, ctypes.byref(length)):
    sys.exit("MPI_Get_library_version failed")
print(text.value.decode(errors="replace"))
"""
ANY = ("pmix", "cray_shasta", "pmi2")
# What a library calls itself, and the plugins that it fits, the likeliest first. MPICH's relatives name MPICH, too.
_SPOKEN = (
    (re.compile(r"Open MPI|Open RTE|OpenRTE|Spectrum MPI|PRRTE", re.IGNORECASE), ("pmix",)),
    (re.compile(r"CRAY MPICH", re.IGNORECASE), ("cray_shasta", "pmi2")),
    (re.compile(r"--with-pmix"), ("pmix", "pmi2")),
    (re.compile(r"MPICH|MVAPICH|Intel\(R\) MPI|HYDRA", re.IGNORECASE), ("pmi2",)),
)
_BY_NAME = {"libmpi.so.40": ("pmix",), "libmpi_cray.so.12": ("cray_shasta", "pmi2"), "libmpi.so.12": ("pmi2",)}


@dataclass(frozen=True)
class Mpi:
    """A library, "" where mpirun alone is known; the plugins that it supports, all if unknown; and its own name."""

    library: str
    plugins: tuple[str, ...]
    called: str


def find_mpi(environ: Mapping[str, str] = os.environ) -> Mpi | None:
    """The MPI of the mpirun on PATH: by its library's own word, else mpirun's, else the name of the file."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun is None:
        return None
    library = _library_beside(mpirun)
    silence = ""
    if library:
        said, silence = _ask([sys.executable, "-I", "-c", _ASK, library], environ)
        if said:
            return Mpi(library, spoken_by(said), f"{_first_line(said)} (its library's own word)")
    said, _ = _ask([mpirun, "--version"], environ)
    if (plugins := spoken_by(said)) != ANY:
        return Mpi(library, plugins, f"{_first_line(said)} (by `mpirun --version`)")
    if not library:
        return None
    return Mpi(library, _BY_NAME[Path(library).name], f"known by its file's name alone (it tells nothing: {silence})")


def spoken_by(said: str) -> tuple[str, ...]:
    """The plugins of srun that fit an MPI of this name; all of them if the name is unknown."""
    return next((plugins for pattern, plugins in _SPOKEN if pattern.search(said)), ANY)


def _library_beside(mpirun: str) -> str:
    """In one of the places where an installation keeps it; "" where it is in none."""
    prefixes = dict.fromkeys((Path(mpirun).parents[1], Path(mpirun).resolve().parents[1]))
    folders = [prefix / below for prefix in prefixes for below in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    found = (folder / name for folder in folders for name in _NAMES)
    return next((str(path) for path in found if path.exists()), "")


def _ask(argv: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What a program prints, or "" and why it printed nothing."""
    try:
        done = subprocess.run(
            argv, env=dict(environ), capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_ANSWER_S:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if done.returncode or not done.stdout.strip():
        return "", _first_line("\n".join(done.stderr.strip().splitlines()[-1:])) or f"exit code {done.returncode}"
    return done.stdout, ""


def _first_line(text: str) -> str:
    """Short enough for a comment behind a key: the version, without who built it and when."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return re.sub(r"[\s\x00-\x1f\x7f]+", " ", line.partition(", package:")[0]).strip()[:120]
