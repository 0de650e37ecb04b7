"""Debian packages for the dev cluster; `python -m toolkit.devcluster.packages` prints them. Standard library only."""

import os
import shutil
import sys
from pathlib import Path

# Programs, with the Debian 12 package that contains each.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "mpirun": "openmpi-bin",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
ACCOUNTING_PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
# Slurm's PMIx plugin loads libpmix.so, a symbolic link that only Debian's development package contains.
PMIX_LINK = "*/pmix2/lib/libpmix.so"
# Packages with plugins and libraries of these programs, which `missing_programs` cannot find on PATH.
LIBRARIES = ("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "libopenmpi3", "libpmix-dev")

PACKAGES = tuple(sorted({*PROGRAMS.values(), *ACCOUNTING_PROGRAMS.values(), *LIBRARIES}))

# Daemons are in sbin folders, which may not be on the PATH of a login shell.
SEARCH_PATH = os.pathsep.join(("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"))


def install_command() -> str:
    """Return the command that installs everything the dev cluster needs on Debian 12."""
    return "apt-get install --yes --no-install-recommends " + " ".join(PACKAGES)


def missing_programs(*, accounting: bool = True) -> list[str]:
    """Return the sorted names of the programs, and of libpmix.so, that are not installed."""
    programs = {**PROGRAMS, **ACCOUNTING_PROGRAMS} if accounting else PROGRAMS
    missing = [name for name in programs if shutil.which(name, path=SEARCH_PATH) is None]
    if not any(Path("/usr/lib").glob(PMIX_LINK)):
        missing.append("libpmix.so")
    return sorted(missing)


if __name__ == "__main__":
    sys.stdout.write(" ".join(PACKAGES) + "\n")
