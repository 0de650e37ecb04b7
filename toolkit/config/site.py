"""The tables of a site file: how users work with a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PrivateAttr, StringConstraints, field_validator

from toolkit.config.container import ContainerTable
from toolkit.config.document import Origin, leaves
from toolkit.config.env import check_variable_names
from toolkit.config.table import Table, key, refuse_value
from toolkit.slurm.sbatch_options import (
    COMPONENTS_ELSEWHERE,
    COMPONENTS_FIX,
    ONE_OPTION_FIX,
    begins_component,
    is_one_option,
    value_of,
)
from toolkit.slurm.times import FORMS, parse_slurm_time

__all__ = ["AUTO", "PartitionTable", "Site"]

Text = Annotated[str, StringConstraints(min_length=1)]
AUTO = "auto"  # not a partition: toolkit chooses the best of those that can serve a job


class DetectTable(Table):
    """How toolkit recognises this site. One match is enough; the keys are tried in their order."""

    environment: dict[str, str] = key(
        None,
        "Variables, each with a pattern for its value.",
        form='a table such as { NERSC_HOST = "perlmutter" }; * matches any string',
        default_factory=dict,
    )
    cluster_name: str = key("", "ClusterName of slurm.conf.")
    hostnames: list[Text] = key(
        None, "Patterns of host names.", form='a list of patterns such as ["login*.example.org"]', default_factory=list
    )
    files: list[Text] = key(None, "Files that exist only here.", form="a list of absolute paths", default_factory=list)


class SchedulerTable(Table):
    """The scheduler of the site."""

    kind: Literal["slurm", "local"] = key("slurm", "The scheduler; `local` starts ranks on this machine.")
    conf: str = key(
        "",
        "slurm.conf for every Slurm command; `~` is the home folder. If the site was detected by the ClusterName of an "
        "exported SLURM_CONF, that file is used.",
    )
    cluster: str = key(
        "",
        "Name of this site's cluster in Slurm's accounting, if Slurm's commands need -M for it. Jobs may name another one.",
        form="the name of one cluster",
    )
    can_requeue: bool = key(
        True, "Users may requeue their jobs; without it a run ends at walltime, and `toolkit resume` continues it."
    )
    options: list[Text] = key(
        None,
        "sbatch options of every job.",
        form='a list of options such as ["--hint=nomultithread"]',
        default_factory=list,
    )

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: list[str]) -> list[str]:
        for option in options:
            if any(value_of(option, *names) is not None for names in (("clusters", "M"), ("cluster",))):
                raise refuse_value(
                    (),
                    f"{option!r} would apply only to sbatch, not to the other commands",
                    "write cluster = ... in [scheduler]",
                )
            if begins_component(option):
                raise refuse_value((), f"{option!r} is rejected: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX)
            if not is_one_option(option):
                raise refuse_value((), f"{option!r} contains more than one option", ONE_OPTION_FIX)
        return options


class LauncherTable(Table):
    """The program that starts the ranks inside an allocation."""

    kind: Literal["auto", "srun", "mpirun", "local"] = key(
        "auto", "`auto` is srun in a Slurm allocation, else mpirun if it is installed, else local."
    )
    mpi: str = key(
        "", "srun's --mpi, which must be what the MPI library was built for.", form='a string such as "pmix"'
    )
    libmpi: str = key("", "MPI library that mpi4py loads (MPI4PY_LIBMPI).")
    mpirun: str = key("", "Path of mpirun; empty searches PATH.")
    options: list[Text] = key(
        None,
        "More options of the launcher.",
        form='a list of options such as ["--cpu-bind=none"]',
        default_factory=list,
    )


class GpuTable(Table):
    """How the site requests GPUs."""

    request: str = key(
        "--gpus-per-node={count}",
        "sbatch option that requests GPUs; {count} is the number on each node.",
        form='a string with {count}, such as "--gres=gpu:{count}"',
    )

    @field_validator("request")
    @classmethod
    def _check_request(cls, request: str) -> str:
        if not request.startswith("-") or re.findall(r"\{.*?\}", request) != ["{count}"]:
            raise ValueError("is not an option with one {count}")
        return request


class SiteEnvTable(Table):
    """What a job needs before its first command."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    modules: list[Text] = key(None, "Modules, loaded in this order.", default_factory=list)
    setup: list[Text] = key(None, "Shell lines, run after the modules are loaded.", default_factory=list)
    vars: dict[str, str] = key(None, "Variables that are set for every rank.", default_factory=dict)

    _check_names = field_validator("vars")(check_variable_names)


class NetworkTable(Table):
    """The network between nodes."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    fabric: Literal["", "infiniband", "slingshot", "ethernet"] = key("", "Type of the network; empty is unknown.")
    interface: str = key("", "Network interface of rendezvous and sockets; empty: the ranks choose it.")
    vars: dict[str, str] = key(
        None, "Variables of NCCL, libfabric and others that the site documents.", default_factory=dict
    )

    _check_names = field_validator("vars")(check_variable_names)


class PathsTable(Table):
    """Where files are stored. In `runs` and `scratch`, `~` and $VARIABLES have their values at submission."""

    runs: str = key(
        "",
        "Folder of run directories, seen by all nodes; empty is ./runs. `~` and $VARIABLES are those of the submission.",
    )
    scratch: str = key("", "Fast folder that all nodes see; `~` and $VARIABLES as in `runs`.")
    local_scratch: str = key("", "Folder on the node itself; its $VARIABLES are the node's.")
    access: Literal["user", "group"] = key("user", "Who may read a run: only its owner, or also the group.")


class PartitionTable(Table):
    """One partition and its limits; 0 or empty is unknown and not checked."""

    max_nodes: int = key(0, "Maximum number of nodes of one job.", ge=0)
    max_time: str = key("", "Longest walltime.", form=FORMS)
    cpus_per_node: int = key(0, "CPUs of a node, as Slurm counts them.", ge=0)
    gpus_per_node: int = key(
        0, "GPUs of a node; if no partition of the site states them, Slurm checks the request.", ge=0
    )
    mem_gb_per_node: int = key(0, "Memory of a node in GiB.", ge=0)
    constraint: str = key("", "Constraint that every job here needs.")
    qos: str = key("", "QOS that every job here needs.")
    account_required: bool = key(False, "A job must name an account.")
    default: bool = key(False, "Used if a job does not name a partition.")

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, time: str) -> str:
        if time:
            parse_slurm_time(time)
        return time

    @property
    def max_time_s(self) -> int | None:
        """Longest walltime in seconds; None if it is unlimited or unknown."""
        return parse_slurm_time(self.max_time) if self.max_time else None


class SiteIdentity(Table):
    """The keys at the top of a site file."""

    name: str = key(
        ...,
        "Name of the site, the file's name without .toml.",
        form="A-Z a-z 0-9 . _ -",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    extends: str = key("", "Another site whose values apply to keys that this file does not set.")
    contact: str = key("", "Contact for questions.")
    docs: str = key("", "The site's own documentation.")
    checked: str = key("", "How this file was verified, and when.")


class Site(SiteIdentity):
    """A site file, merged with those that it extends."""

    detect: DetectTable = key(None, "How toolkit recognises this site.", default_factory=DetectTable)
    scheduler: SchedulerTable = key(None, "The scheduler of the site.", default_factory=SchedulerTable)
    launcher: LauncherTable = key(None, "The program that starts the ranks.", default_factory=LauncherTable)
    gpu: GpuTable = key(None, "How GPUs are requested.", default_factory=GpuTable)
    env: SiteEnvTable = key(None, "The environment before a job's first command.", default_factory=SiteEnvTable)
    network: NetworkTable = key(None, "The network between nodes.", default_factory=NetworkTable)
    paths: PathsTable = key(None, "Where files are stored.", default_factory=PathsTable)
    container: ContainerTable = key(None, "The container that ranks run in.", default_factory=ContainerTable)
    partitions: dict[str, PartitionTable] = key(None, "The partitions by name.", default_factory=dict)

    # The origin of each value, by its dotted key; set by the loader.
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    # The site's own file, not those that it extends; set by the loader.
    _file: Path = PrivateAttr(default_factory=Path)

    @property
    def file(self) -> Path:
        """The file that this site was loaded from."""
        return self._file

    @property
    def origins(self) -> dict[str, Origin]:
        """The origin of each value that is not a default, by dotted key."""
        return self._origins

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, tables in the file's order."""
        for path, value in leaves(self.model_dump(by_alias=True)):
            yield ".".join(path), value

    def with_conf(self, conf: Path, variable: str) -> Site:
        """Return the site with another slurm.conf, from the environment variable `variable`."""
        scheduler = self.scheduler.model_copy(update={"conf": str(conf)})
        site = self.model_copy(update={"scheduler": scheduler})
        site._origins = {**self._origins, "scheduler.conf": Origin("environment", variable)}
        return site

    @property
    def default_partition(self) -> str:
        """The name of the default partition, or an empty string."""
        return next((name for name, partition in self.partitions.items() if partition.default), "")
