"""Which MPI a host has, by the word of the real libraries here: Debian's Open MPI, and the MPICH of our own environment."""

import ctypes.util
import shutil
import sys
from pathlib import Path

import pytest

from toolkit.site.mpi import find_mpi, supported_by

OPEN_MPI = ctypes.util.find_library("mpi")


@pytest.fixture
def prefix(tmp_path):
    """An installation whose mpirun is silent; `make(name, library)` puts a library there under any name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text("#!/bin/sh\nexit 1\n")
    mpirun.chmod(0o755)

    def make(name, library):
        (tmp_path / "lib" / name).symlink_to(library)
        return find_mpi({"PATH": f"{tmp_path}/bin:/bin"})

    return make


@pytest.mark.skipif(OPEN_MPI is None, reason="no Open MPI is installed here")
def test_an_open_mpi_under_mpichs_name_is_an_open_mpi(prefix):
    found = prefix("libmpi.so.12", next(Path("/usr/lib").glob(f"*/{OPEN_MPI}")))
    assert found.plugins == ("pmix",) and found.called.startswith("Open MPI v")


@pytest.mark.skipif(shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None, reason="no MPICH in it")
def test_the_mpich_of_this_environment():
    found = find_mpi({"PATH": str(Path(sys.executable).parent)})
    assert found.plugins == ("pmi2",) and found.called.startswith("MPICH Version: ")


def test_a_library_that_cannot_be_loaded_is_judged_by_its_name(prefix):
    found = prefix("libmpi_cray.so.12", "/dev/null")
    assert found.plugins == ("cray_shasta", "pmi2") and "identified only by its file name" in found.called


def test_no_mpirun_is_no_mpi():
    assert find_mpi({"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("said", "plugins"),
    [
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", ("cray_shasta", "pmi2")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", ("pmi2",)),
        ("MVAPICH2 Version      :\t2.3.7", ("pmi2",)),
        ("MPICH Version:\t4.2.0\nMPICH configure:\t--with-pmix=/usr --with-device=ch4:ofi", ("pmix", "pmi2")),
        ("IBM Spectrum MPI 10.4.0", ("pmix",)),
    ],
)
def test_what_a_library_calls_itself(said, plugins):
    assert supported_by(said) == plugins
