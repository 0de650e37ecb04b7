"""The tables [[component]] of a heterogeneous job: the resources of one component, which override those of [job]."""

from pydantic import BaseModel, ConfigDict

from toolkit.config.job import MOST_NODES, JobTable, Text
from toolkit.config.site import GpuTable, PartitionTable
from toolkit.config.table import Table, key

_OF_JOB = "the value in [job]"


class ComponentTable(Table):
    """One component of a heterogeneous job; keys that it does not set default to the values of [job]."""

    nodes: int | None = key(
        None, "Nodes of this component.", form="a whole number from 1", derived=_OF_JOB, ge=1, le=MOST_NODES
    )
    ranks_per_node: int | None = key(None, "Number of ranks per node.", derived=_OF_JOB, ge=1)
    cpus_per_rank: int | None = key(None, "Number of CPUs per rank.", derived=_OF_JOB, ge=1)
    gpus_per_node: int | None = key(None, "Number of GPUs per node.", derived=_OF_JOB, ge=0)
    mem_gb_per_node: int | None = key(None, "Memory per node in GiB.", derived=_OF_JOB, ge=0)
    partition: str | None = key(None, "Partition of the site.", derived=_OF_JOB)
    account: str | None = key(None, "Account to charge for this component.", derived=_OF_JOB)
    qos: str | None = key(None, "Quality of service.", derived=_OF_JOB)
    constraint: str | None = key(None, "Required node features, in the syntax of sbatch -C.", derived=_OF_JOB)
    nodelist: str | None = key(None, "Hostlist of nodes that this component must include.", derived=_OF_JOB)
    sbatch: list[Text] | None = key(
        None,
        "sbatch options for this component, instead of those of [job]. Options that have a key of their own are rejected.",
        form='a list of options such as ["--exclusive"]',
        derived=_OF_JOB,
    )

    @property
    def stated(self) -> dict[str, object]:
        """The keys that the component sets, with their values."""
        return self.model_dump(exclude_none=True)


class ResolvedComponent(BaseModel):
    """The values of [job] for one component, the limits of its partition, and how GPUs are requested there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobTable
    partition_limits: PartitionTable | None = None
    gpu: GpuTable | None = None  # absent in older records
