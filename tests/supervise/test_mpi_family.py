"""A compiled MPI program is started by the mpirun of its own MPI, or refused."""

import os
import shutil
import subprocess

import pytest

from toolkit.errors import OwnFailureError
from toolkit.supervise.mpi_family import MPICH, OPEN_MPI, family_of_program, family_of_version, mpirun_of

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


@needs_open_mpi
def test_each_process_of_a_compiled_program_has_its_own_rank(hello, toolkit):
    job = toolkit.folder / "job.toml"
    job.write_text(f'[job]\nentry = ["{hello}"]\nranks_per_node = 3\n')
    said = toolkit("run", job)
    assert said.code == 0, said
    assert sorted(line[4:] for line in said.out.splitlines()) == [f"process {rank} of 3" for rank in range(3)]
