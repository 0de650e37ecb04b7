"""The properties of this host outside Slurm: its networks, an MPI library, folders that variables name.

They are only a guess for the compute nodes: a login node may have other networks, modules and disks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.site.mpi import Mpi, find_mpi

NETWORKS = Path("/sys/class/net")
# Prefixes of interface names by network type, the fastest first.
_FABRICS = (("hsn", "slingshot"), ("ib", "infiniband"))
_SHARED = ("SCRATCH", "PSCRATCH", "WORK")
_NOT_A_NETWORK = ("lo", "docker", "veth", "br-", "virbr", "tkdc")


@dataclass(frozen=True)
class Host:
    """`fabric` and `interface` of the fastest network, the MPI of mpirun, a variable that names a shared folder."""

    fabric: str
    interface: str
    mpi: Mpi | None
    shared_variable: str
    modules: tuple[str, ...]


def look_at_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Inspect this machine; missing properties are "" or empty."""
    fabric, interface = _network()
    return Host(
        fabric=fabric,
        interface=interface,
        mpi=find_mpi(environ),
        shared_variable=next((name for name in _SHARED if Path(environ.get(name) or "/nowhere").is_dir()), ""),
        modules=tuple(name for name in environ.get("LOADEDMODULES", "").split(":") if name),
    )


def _network() -> tuple[str, str]:
    names = sorted(path.name for path in NETWORKS.iterdir()) if NETWORKS.is_dir() else []
    for prefix, fabric in _FABRICS:
        for name in names:
            if name.startswith(prefix) and name[len(prefix) :].isdigit():
                return fabric, name
    others = [name for name in names if not name.startswith(_NOT_A_NETWORK)]
    return ("ethernet", others[0]) if others else ("", "")
