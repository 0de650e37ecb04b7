"""Which MPI library mpi4py is to load, so that it speaks the launcher's process management interface.

A wrong one does not raise: it starts as rank 0 of 1, or aborts the process. A value that the site or the user gave
(MPI4PY_LIBMPI) is kept.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping, MutableMapping
from importlib import metadata

from toolkit.errors import ToolkitError

OPEN_MPI_LIBRARY = "libmpi.so.40"  # the soname of Open MPI 4 and 5


def launched_by_pmix(environ: Mapping[str, str]) -> bool:
    """True under `srun --mpi=pmix` and Open MPI's mpirun, which both speak PMIx."""
    return "PMIX_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ


def pin_library(environ: MutableMapping[str, str] | None = None) -> bool:
    """Pin the library for this process; False when no MPI here can talk to the launcher.

    Under PMIx that is Open MPI, where the dynamic linker finds one. The `mpich` wheel speaks Hydra's PMI only and
    ends the process under PMIx, so it is never tried there. In every other case mpi4py's own search is right.
    """
    env = os.environ if environ is None else environ
    if env.get("MPI4PY_LIBMPI") or not launched_by_pmix(env):
        return True
    try:
        ctypes.CDLL(OPEN_MPI_LIBRARY, mode=ctypes.RTLD_LOCAL)
    except OSError:  # no Open MPI on the linker's path
        return not _wheel_installed("mpich")
    env["MPI4PY_LIBMPI"] = OPEN_MPI_LIBRARY
    return True


def check_library(environ: Mapping[str, str]) -> None:
    """Refuse an Open MPI inside an srun step without PMIx, before it prints a page and ends the process.

    Raises:
        ToolkitError: with the `--mpi` that fits.
    """
    library = environ.get("MPI4PY_LIBMPI", "")
    in_step = "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", "").isdigit()
    if in_step and library.endswith(OPEN_MPI_LIBRARY) and "PMI_RANK" in environ and not launched_by_pmix(environ):
        raise ToolkitError(
            "srun speaks PMI-2 and Open MPI wants PMIx: every process would believe to be rank 0 of 1",
            where=socket.gethostname(),
            fix='srun --mpi=pmix (site file: launcher.mpi = "pmix"; `srun --mpi=list` shows what there is)',
        )


def _wheel_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
