"""The dev cluster's Debian packages; `python -m toolkit.devcluster.packages` prints them. Standard library only."""

import os
import shutil
import sys
from pathlib import Path

# program: the Debian 12 package that contains it
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
# Slurm's PMIx plugin opens libpmix.so, a link that Debian ships only in the development package.
PMIX_LINK = "*/pmix2/lib/libpmix.so"
# Loaded by the programs above, so no program on PATH shows whether they are installed.
LIBRARIES = ("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "libopenmpi3", "libpmix-dev")

PACKAGES = tuple(sorted({*PROGRAMS.values(), *ACCOUNTING_PROGRAMS.values(), *LIBRARIES}))

# Daemons live in sbin, which a login shell may not have on PATH.
SEARCH_PATH = os.pathsep.join(("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"))


def install_command() -> str:
    """The command that installs everything the dev cluster needs on Debian 12."""
    return "apt-get install --yes --no-install-recommends " + " ".join(PACKAGES)


def missing_programs(*, accounting: bool = True) -> list[str]:
    """Names of the programs and of the library that are not installed, sorted."""
    programs = {**PROGRAMS, **ACCOUNTING_PROGRAMS} if accounting else PROGRAMS
    missing = [name for name in programs if shutil.which(name, path=SEARCH_PATH) is None]
    if not any(Path("/usr/lib").glob(PMIX_LINK)):
        missing.append("libpmix.so")
    return sorted(missing)


if __name__ == "__main__":
    sys.stdout.write(" ".join(PACKAGES) + "\n")
