"""The tables [[component]] of a heterogeneous job: what one component requests in place of [job]'s values."""

from pydantic import BaseModel, ConfigDict, field_validator

from toolkit.config.job import MOST_NODES, JobTable, Text, check_sbatch_options
from toolkit.config.site import PartitionTable
from toolkit.config.table import Table, key

_OF_JOB = "that of [job]"


class ComponentTable(Table):
    """One component; keys that it does not set have the values of [job]."""

    nodes: int | None = key(
        None, "Nodes of this component.", form="a whole number from 1", derived=_OF_JOB, ge=1, le=MOST_NODES
    )
    ranks_per_node: int | None = key(None, "Ranks on each of its nodes.", derived=_OF_JOB, ge=1)
    cpus_per_rank: int | None = key(None, "CPUs of each of its ranks.", derived=_OF_JOB, ge=1)
    gpus_per_node: int | None = key(None, "GPUs on each of its nodes.", derived=_OF_JOB, ge=0)
    mem_gb_per_node: int | None = key(None, "Memory of each of its nodes in GiB.", derived=_OF_JOB, ge=0)
    partition: str | None = key(None, "Partition of the site.", derived=_OF_JOB)
    account: str | None = key(None, "Account that is charged for it.", derived=_OF_JOB)
    qos: str | None = key(None, "Quality of service.", derived=_OF_JOB)
    constraint: str | None = key(None, "Node features, in the form of sbatch's -C.", derived=_OF_JOB)
    nodelist: str | None = key(None, "Hostlist of nodes that it must contain.", derived=_OF_JOB)
    sbatch: list[Text] | None = key(
        None,
        "More sbatch options for this component, in place of [job]'s; options that another key sets are rejected.",
        form='a list of options such as ["--exclusive"]',
        derived=_OF_JOB,
    )

    @field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, options: list[str] | None) -> list[str] | None:
        return None if options is None else check_sbatch_options(options)

    @property
    def stated(self) -> dict[str, object]:
        """The keys that the component itself sets."""
        return self.model_dump(exclude_none=True)


class ResolvedComponent(BaseModel):
    """[job] for one component, and the site's limits of its partition."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobTable
    partition_limits: PartitionTable | None = None
