"""The tables of a site file, which describes a cluster: scheduler, launcher, partitions, network and paths."""

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
AUTO = "auto"  # the value of job.partition with which toolkit chooses the best partition that can run the job


class DetectTable(Table):
    """How toolkit recognizes this site. One matching key is enough; toolkit tries them in this order."""

    environment: dict[str, str] = key(
        None,
        "Environment variables, each with a glob pattern that its value must match.",
        form='a table such as { NERSC_HOST = "perlmutter" }; * matches any string',
        default_factory=dict,
    )
    cluster_name: str = key("", "ClusterName in slurm.conf.")
    hostnames: list[Text] = key(
        None, "Globs of host names.", form='a list of patterns such as ["login*.example.org"]', default_factory=list
    )
    files: list[Text] = key(
        None, "Files that only this site has.", form="a list of absolute paths", default_factory=list
    )


class SchedulerTable(Table):
    """The scheduler of the site."""

    kind: Literal["slurm", "local"] = key("slurm", "The scheduler; `local` means none: ranks start on this machine.")
    conf: str = key(
        "",
        "Path of the slurm.conf for all Slurm commands; `~` is the home folder. If toolkit detected the site by the "
        "ClusterName in the file that SLURM_CONF names, it uses that file instead.",
    )
    cluster: str = key(
        "",
        "Name of this cluster in Slurm accounting, if Slurm commands need -M to reach it. A job may name another cluster.",
        form="the name of one cluster",
    )
    can_requeue: bool = key(
        True, "Whether users may requeue jobs. If not, a run ends at its walltime, and `toolkit resume` continues it."
    )
    options: list[Text] = key(
        None,
        "sbatch options for every job.",
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
                    f"{option!r} would apply only to sbatch, not to squeue, scancel and other Slurm commands",
                    "set cluster in [scheduler] instead",
                )
            if begins_component(option):
                raise refuse_value((), f"{option!r} is rejected: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX)
            if not is_one_option(option):
                raise refuse_value((), f"{option!r} contains more than one option", ONE_OPTION_FIX)
        return options


class LauncherTable(Table):
    """The program that starts the ranks inside an allocation."""

    kind: Literal["auto", "srun", "mpirun", "local"] = key(
        "auto", "The launcher; `auto` is srun in a Slurm allocation, else mpirun if it is installed, else local."
    )
    mpi: str = key(
        "", "Value of srun --mpi, which must match the PMI of the MPI library.", form='a string such as "pmix"'
    )
    libmpi: str = key("", "MPI library that mpi4py loads (MPI4PY_LIBMPI).")
    mpirun: str = key("", "Path of mpirun; empty searches PATH.")
    options: list[Text] = key(
        None,
        "Additional options for the launcher.",
        form='a list of options such as ["--cpu-bind=none"]',
        default_factory=list,
    )


def check_gpu_request(request: str) -> str:
    """Return an option that requests GPUs; raise an error if it is not valid."""
    if not request.startswith("-") or re.findall(r"\{.*?\}", request) != ["{count}"]:
        raise ValueError("is not a valid option: expected one {count} in it")
    return request


class GpuTable(Table):
    """How the site requests GPUs."""

    request: str = key(
        "--gpus-per-node={count}",
        "sbatch option that requests GPUs; {count} is the number on each node.",
        form='a string with {count}, such as "--gres=gpu:{count}"',
    )

    _check_request = field_validator("request")(check_gpu_request)


class SiteEnvTable(Table):
    """The environment that a job needs before its first command."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    modules: list[Text] = key(None, "Modules to load, in this order.", default_factory=list)
    setup: list[Text] = key(None, "Shell lines to run after the modules are loaded.", default_factory=list)
    vars: dict[str, str] = key(None, "Variables to set for every rank.", default_factory=dict)

    _check_names = field_validator("vars")(check_variable_names)


class NetworkTable(Table):
    """The network between nodes."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    fabric: Literal["", "infiniband", "slingshot", "ethernet"] = key("", "Type of the network; empty is unknown.")
    interface: str = key(
        "", "Network interface for rendezvous and sockets, also of Open MPI; empty lets the ranks choose it."
    )
    vars: dict[str, str] = key(
        None,
        "Environment variables for NCCL, libfabric and other libraries, as the site's documentation recommends.",
        default_factory=dict,
    )

    _check_names = field_validator("vars")(check_variable_names)


class PathsTable(Table):
    """Where files are stored. `~` and $VARIABLES in `runs` and `scratch` are expanded at submission."""

    runs: str = key(
        "",
        "Folder of all run directories, visible to all nodes; empty is ./runs. `~` and $VARIABLES are expanded at submission.",
    )
    scratch: str = key("", "Folder on a fast file system that all nodes see; `~` and $VARIABLES as in `runs`.")
    local_scratch: str = key("", "Folder on a node-local disk; $VARIABLES are expanded on the node.")
    access: Literal["user", "group"] = key(
        "user", "Who may read a run: `user`, only its owner; `group`, also its group."
    )


class PartitionTable(Table):
    """One partition and its limits; 0 or empty means unknown, which toolkit does not check."""

    max_nodes: int = key(0, "Maximum number of nodes per job.", ge=0)
    max_time: str = key("", "Maximum walltime.", form=FORMS)
    cpus_per_node: int = key(0, "CPUs per node, as Slurm counts them.", ge=0)
    gpus_per_node: int = key(
        0, "GPUs per node. If no partition of the site states its GPUs, only Slurm checks the request.", ge=0
    )
    mem_gb_per_node: int = key(0, "Memory per node in GiB.", ge=0)
    constraint: str = key("", "Constraint that jobs in this partition need.")
    qos: str = key("", "QOS that jobs in this partition need.")
    account_required: bool = key(False, "Whether a job must name an account.")
    default: bool = key(False, "Whether this is the partition of jobs that do not name one.")
    gpu_request: str = key(
        "",
        "sbatch option that requests GPUs here, instead of `gpu.request`; {count} as there.",
        form='a string with {count}, such as "--gpus-per-node=a100:{count}"',
    )
    modules: list[Text] | None = key(None, "Modules to load for jobs here, instead of `env.modules`.")
    interface: str = key("", "Network interface of the nodes here, instead of `network.interface`.")
    launcher: Literal["", "auto", "srun", "mpirun", "local"] = key(
        "", "The launcher for jobs here, instead of `launcher.kind`."
    )

    _check_gpu_request = field_validator("gpu_request")(lambda request: request and check_gpu_request(request))

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, time: str) -> str:
        if time:
            parse_slurm_time(time)
        return time

    @property
    def max_time_s(self) -> int | None:
        """Maximum walltime in seconds; None if it is unlimited or unknown."""
        return parse_slurm_time(self.max_time) if self.max_time else None


class SiteIdentity(Table):
    """The keys at the top of a site file."""

    name: str = key(
        ...,
        "Name of the site, which must be the file name without .toml.",
        form="A-Z a-z 0-9 . _ -",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    extends: str = key("", "Another site, whose values apply to all keys that this file does not set.")
    contact: str = key("", "Contact for questions.")
    docs: str = key("", "URL of the site's documentation.")
    checked: str = key("", "How and when this file was verified.")


class Site(SiteIdentity):
    """A site file, merged with the files that it extends."""

    detect: DetectTable = key(None, "How toolkit recognizes this site.", default_factory=DetectTable)
    scheduler: SchedulerTable = key(None, "The scheduler of the site.", default_factory=SchedulerTable)
    launcher: LauncherTable = key(None, "The program that starts the ranks.", default_factory=LauncherTable)
    gpu: GpuTable = key(None, "How the site requests GPUs.", default_factory=GpuTable)
    env: SiteEnvTable = key(None, "Environment to set up before a job's first command.", default_factory=SiteEnvTable)
    network: NetworkTable = key(None, "The network between nodes.", default_factory=NetworkTable)
    paths: PathsTable = key(None, "Where files are stored.", default_factory=PathsTable)
    container: ContainerTable = key(None, "The container that ranks run in.", default_factory=ContainerTable)
    partitions: dict[str, PartitionTable] = key(None, "The partitions by name.", default_factory=dict)

    # The loader of site files sets this attribute.
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    _file: Path = PrivateAttr(default_factory=Path)

    @property
    def file(self) -> Path:
        """The file from which this site was loaded, not a file that it extends."""
        return self._file

    @property
    def origins(self) -> dict[str, Origin]:
        """The origin of each value that is not a built-in default, by dotted key."""
        return self._origins

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, with the tables in the order of the file."""
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
        """The name of the default partition; "" if the site has none."""
        return next((name for name, partition in self.partitions.items() if partition.default), "")
