"""The tables of a site file: what a cluster is to its users."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PrivateAttr, StringConstraints, field_validator

from toolkit.config.container import ContainerTable
from toolkit.config.document import leaves
from toolkit.config.env import check_variable_names
from toolkit.config.origins import Origin
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

Text = Annotated[str, StringConstraints(min_length=1)]
AUTO = "auto"  # the name of no partition: of those that can serve a job the best is chosen


class DetectTable(Table):
    """How this site is known. One match is enough; the table of means is tried in the order of its keys."""

    environment: dict[str, str] = key(
        None,
        "Variables with the pattern that their value matches.",
        form='a table such as { NERSC_HOST = "perlmutter" }; * matches any string',
        default_factory=dict,
    )
    cluster_name: str = key("", "ClusterName of slurm.conf.")
    hostnames: list[Text] = key(
        None, "Patterns of host names.", form='a list of patterns such as ["login*.example.org"]', default_factory=list
    )
    files: list[Text] = key(None, "Files that exist only here.", form="a list of absolute paths", default_factory=list)


class SchedulerTable(Table):
    """What takes the jobs."""

    kind: Literal["slurm", "local"] = key("slurm", "The scheduler; `local` starts ranks on this machine.")
    conf: str = key(
        "",
        "slurm.conf for every Slurm command; `~` is the home folder. Where ClusterName of an exported "
        "SLURM_CONF is what the site was detected by, that file is used.",
    )
    cluster: str = key(
        "",
        "Cluster of that Slurm's accounting which this site is, where Slurm's commands need -M for it. Jobs may name another.",
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
                    (), f"{option!r} would leave every other command behind", "write cluster = ... in [scheduler]"
                )
            if begins_component(option):
                raise refuse_value((), f"{option!r} is refused: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX)
            if not is_one_option(option):
                raise refuse_value((), f"{option!r} contains more than one option", ONE_OPTION_FIX)
        return options


class LauncherTable(Table):
    """What starts the ranks inside an allocation."""

    kind: Literal["auto", "srun", "mpirun", "local"] = key(
        "auto", "`auto` is srun in a Slurm allocation, else mpirun where there is one, else local."
    )
    mpi: str = key(
        "", "srun's --mpi, which must be what the MPI library was built for.", form='a string such as "pmix"'
    )
    libmpi: str = key("", "MPI library that mpi4py loads (MPI4PY_LIBMPI).")
    mpirun: str = key("", "Path of mpirun; empty looks on PATH.")
    options: list[Text] = key(
        None,
        "More options of the launcher.",
        form='a list of options such as ["--cpu-bind=none"]',
        default_factory=list,
    )


class GpuTable(Table):
    """The site's dialect for asking for GPUs."""

    request: str = key(
        "--gpus-per-node={count}",
        "sbatch option that requests GPUs; {count} is the number on each node.",
        form='a string with {count}, such as "--gres=gpu:{count}"',
    )

    @field_validator("request")
    @classmethod
    def _check_request(cls, request: str) -> str:
        if not request.startswith("-") or re.findall(r"\{.*?\}", request) != ["{count}"]:
            raise ValueError("expected an option with one {count}")
        return request


class SiteEnvTable(Table):
    """What a job needs before its first command."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    modules: list[Text] = key(None, "Modules, loaded in this order.", default_factory=list)
    setup: list[Text] = key(None, "Shell lines, run after the modules are loaded.", default_factory=list)
    vars: dict[str, str] = key(None, "Variables that are set for every rank.", default_factory=dict)

    _check_names = field_validator("vars")(check_variable_names)


class NetworkTable(Table):
    """The fabric between nodes."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    fabric: Literal["", "infiniband", "slingshot", "ethernet"] = key("", "Kind of the fabric; empty is unknown.")
    interface: str = key("", "Network interface of rendezvous and sockets; empty lets the ranks find it.")
    vars: dict[str, str] = key(
        None, "Variables of NCCL, libfabric and others that the site documents.", default_factory=dict
    )

    _check_names = field_validator("vars")(check_variable_names)


class PathsTable(Table):
    """Where files go. In `runs` and `scratch`, `~` and $VARIABLES are expanded at submission."""

    runs: str = key(
        "",
        "Folder of run directories, seen by all nodes; empty is ./runs. `~` and $VARIABLES are those of the submission.",
    )
    scratch: str = key("", "Fast folder that all nodes see; `~` and $VARIABLES as in `runs`.")
    local_scratch: str = key("", "Folder on the node itself; its $VARIABLES are the node's.")
    access: Literal["user", "group"] = key("user", "Who may read a run: its owner alone, or the group too.")


class PartitionTable(Table):
    """One partition and its limits; 0 or empty is unknown and not checked."""

    max_nodes: int = key(0, "Largest number of nodes of one job.", ge=0)
    max_time: str = key("", "Longest walltime.", form=FORMS)
    cpus_per_node: int = key(0, "CPUs of a node, as Slurm counts them.", ge=0)
    gpus_per_node: int = key(
        0, "GPUs of a node; a site that names none in any partition leaves the check to Slurm.", ge=0
    )
    mem_gb_per_node: int = key(0, "Memory of a node in GiB.", ge=0)
    constraint: str = key("", "Constraint that every job here needs.")
    qos: str = key("", "QOS that every job here needs.")
    account_required: bool = key(False, "A job must name an account.")
    default: bool = key(False, "Taken when a job names no partition.")

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, time: str) -> str:
        if time:
            parse_slurm_time(time)
        return time

    @property
    def max_time_s(self) -> int | None:
        """Longest walltime in seconds; None when unlimited or unknown."""
        return parse_slurm_time(self.max_time) if self.max_time else None


class SiteIdentity(Table):
    """The keys at the top of a site file."""

    name: str = key(
        ...,
        "Name of the site, the file's name without .toml.",
        form="letters, digits, . _ -",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    extends: str = key("", "Another site whose keys apply unless this file sets them.")
    contact: str = key("", "Whom to ask.")
    docs: str = key("", "The site's own documentation.")
    checked: str = key("", "How far this file was proved, and when.")


class Site(SiteIdentity):
    """A site file, with what it extends merged in."""

    detect: DetectTable = key(None, "How this site is known.", default_factory=DetectTable)
    scheduler: SchedulerTable = key(None, "What takes the jobs.", default_factory=SchedulerTable)
    launcher: LauncherTable = key(None, "What starts the ranks.", default_factory=LauncherTable)
    gpu: GpuTable = key(None, "How GPUs are asked for.", default_factory=GpuTable)
    env: SiteEnvTable = key(None, "What a job needs first.", default_factory=SiteEnvTable)
    network: NetworkTable = key(None, "The fabric.", default_factory=NetworkTable)
    paths: PathsTable = key(None, "Where files go.", default_factory=PathsTable)
    container: ContainerTable = key(None, "The container that ranks run in.", default_factory=ContainerTable)
    partitions: dict[str, PartitionTable] = key(None, "The partitions by name.", default_factory=dict)

    # Where each value stands, by its dotted key; filled by the loader.
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    # The site's own file, not those that it extends; filled by the loader.
    _file: Path = PrivateAttr(default_factory=Path)

    @property
    def file(self) -> Path:
        """The file that this site was loaded from."""
        return self._file

    @property
    def origins(self) -> dict[str, Origin]:
        """Where each value that is not a default came from, by dotted key."""
        return self._origins

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, tables in the file's order."""
        for path, value in leaves(self.model_dump(by_alias=True)):
            yield ".".join(path), value

    def with_conf(self, conf: Path, variable: str) -> Site:
        """Return the site with another slurm.conf, which `variable` of the environment names."""
        scheduler = self.scheduler.model_copy(update={"conf": str(conf)})
        site = self.model_copy(update={"scheduler": scheduler})
        site._origins = {**self._origins, "scheduler.conf": Origin("environment", variable)}
        return site

    @property
    def default_partition(self) -> str:
        """The name of the default partition, or an empty text."""
        return next((name for name, partition in self.partitions.items() if partition.default), "")
