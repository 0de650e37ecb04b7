"""A compiled MPI program is started by the mpirun of its own MPI, or refused."""

import os
import shutil
import subprocess

import pytest

from toolkit.errors import OwnFailureError
from toolkit.supervise.mpi_family import (
    MPICH,
    OPEN_MPI,
    family_of_program,
    family_of_version,
    mpi_of_program,
    mpirun_of,
)

# Debian's runtime package has no mpi.h; these are the symbols of Open MPI's library.
HELLO = r"""
#include <stdio.h>
extern char ompi_mpi_comm_world[];
int MPI_Init(int *, char ***), MPI_Comm_rank(void *, int *), MPI_Comm_size(void *, int *), MPI_Finalize(void);
int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(ompi_mpi_comm_world, &rank);
  MPI_Comm_size(ompi_mpi_comm_world, &size);
  printf("process %d of %d\n", rank, size);
  return MPI_Finalize();
}
"""
needs_open_mpi = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("mpirun.openmpi")), reason="needs gcc and Debian's Open MPI"
)


@pytest.fixture
def hello(tmp_path):
    (tmp_path / "hello.c").write_text(HELLO)
    subprocess.run(["gcc", "-w", "-o", "hello", "hello.c", "-l:libmpi.so.40"], cwd=tmp_path, check=True)
    return tmp_path / "hello"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 4.1.4", OPEN_MPI),
        ("mpirun (PRRTE) 3.0.2\nprte 3", OPEN_MPI),
        ("HYDRA build details:\n    Version: 4.2", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", MPICH),
        ("", ""),
    ],
)
def test_the_version_of_mpirun_names_its_mpi(text, family):
    assert family_of_version(text) == family


@needs_open_mpi
def test_the_mpirun_of_the_other_mpi_first_on_path_is_passed_over(hello, tmp_path, monkeypatch):
    other = tmp_path / "bin" / "mpirun"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o755)
    environment = {**os.environ, "PATH": f"{other.parent}:/usr/bin:/bin"}
    assert family_of_program("./hello", tmp_path, environment) == OPEN_MPI
    found = mpirun_of(OPEN_MPI, "", environment, program="./hello")
    assert os.path.realpath(found) == os.path.realpath("/usr/bin/mpirun.openmpi")
    with pytest.raises(OwnFailureError, match=r"is linked with Open MPI, but the launchers here are .*mpirun .MPICH"):
        mpirun_of(OPEN_MPI, str(other), environment, program="./hello")


@pytest.mark.parametrize("program", ["./script.sh", "true", "no-such-program"])
def test_a_program_without_mpi_has_no_family(tmp_path, program):
    (tmp_path / "script.sh").write_text("#!/bin/sh\n")
    (tmp_path / "script.sh").chmod(0o755)
    assert family_of_program(program, tmp_path, os.environ) == ""


LISTED = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4"
)
MPICH_LIBRARY, CRAY = "\tlibmpi.so.12 => /lib/libmpi.so.12", "\tlibmpi_cray.so.12 => /opt/cray/libmpi_cray.so.12"
BUILT_WITH_PMIX = MPICH_LIBRARY + "\n\tlibpmix.so.2 => /lib/libpmix.so.2"


@pytest.mark.parametrize(
    ("libraries", "configured", "listed", "chosen"),
    [
        (MPICH_LIBRARY, "pmix", LISTED, "pmi2"),
        (MPICH_LIBRARY, "", LISTED, "pmi2"),
        (MPICH_LIBRARY, "pmi2", LISTED, "pmi2"),
        (MPICH_LIBRARY, "pmix", LISTED.replace("pmi2", "pmi1"), "pmix"),  # the site has nothing else
        (BUILT_WITH_PMIX, "pmix_v4", LISTED, "pmix_v4"),
        (BUILT_WITH_PMIX, "none", LISTED, "pmix"),
        (CRAY, "pmix", LISTED, "cray_shasta"),
        ("\tlibmpi.so.40 => /lib/libmpi.so.40", "pmi2", LISTED, "pmix"),
        ("\tlibmpi.so.40 => /lib/libmpi.so.40", "pmix_v4", LISTED, "pmix_v4"),
        ("\tlibc.so.6 => /lib/libc.so.6", "pmix", LISTED, "pmix"),
    ],
)
def test_the_mpi_of_a_program_decides_the_pmi_of_srun(tmp_path, libraries, configured, listed, chosen):
    for name, printed in (("ldd", libraries), ("srun", listed)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat >&{1 if name == 'ldd' else 2} <<'END'\n{printed}\nEND\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert mpi_of_program("./program", tmp_path, environment, configured) == chosen
    own = {**environment, "I_MPI_PMI_LIBRARY": "/lib/libpmi2.so"}  # of Intel MPI
    assert mpi_of_program("./program", tmp_path, own, configured) == configured


@needs_open_mpi
def test_each_process_of_a_compiled_program_has_its_own_rank(hello, toolkit):
    job = toolkit.folder / "job.toml"
    job.write_text(f'[job]\nentry = ["{hello}"]\nranks_per_node = 3\n')
    said = toolkit("run", job)
    assert said.code == 0, said
    assert sorted(line[4:] for line in said.out.splitlines()) == [f"process {rank} of 3" for rank in range(3)]
