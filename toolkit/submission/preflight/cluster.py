"""Query the cluster: one cheap query per fact, independent ones in parallel."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.runs.record.job import Request
from toolkit.slurm.associations import (
    Association,
    Limits,
    QueuedJob,
    associations_of,
    default_account,
    every_qos,
    queued_jobs,
)
from toolkit.slurm.commands import Slurm
from toolkit.slurm.limits import (
    NodeShape,
    PartitionLimits,
    Reservation,
    cluster_settings,
    every_partition,
    node_shapes,
    reservations,
)

__all__ = ["PATIENCE_S", "Accounting", "Cluster", "ask_cluster", "default_qos"]

T = TypeVar("T")
PATIENCE_S = 5.0  # for each query, so that a busy cluster does not delay a submission


@dataclass(frozen=True)
class Accounting:
    """What accounting allows this user, and the user's queued jobs, which are None if squeue did not respond."""

    user: str
    default_account: str
    associations: Sequence[Association]
    qos: Mapping[str, Limits]
    queued: Sequence[QueuedJob] | None = ()

    def queued_against(self, whose: str, mine: Association) -> int:
        """Return how many of the user's queued jobs count against a QOS, or against the association `mine`."""
        return sum(
            whose == f"QOS {one.qos}" or (whose == f"account {one.account}" and mine.partition in ("", one.partition))
            for one in self.queued or ()
        )


@dataclass(frozen=True)
class Cluster:
    """The cluster's responses; None if not queried or not reported. `silent` lists the failed queries and why."""

    settings: Mapping[str, str]
    partitions: Mapping[str, PartitionLimits]
    shapes: Sequence[NodeShape] | None = None
    reservations: Sequence[Reservation] | None = None  # those with the name that the job requests
    accounting: Accounting | None = None
    silent: Sequence[str] = field(default_factory=tuple)

    def enforces(self, *words: str) -> bool:
        """Return whether AccountingStorageEnforce contains one of `words`, or "all"."""
        enforced = set(self.settings.get("AccountingStorageEnforce", "").lower().split(","))
        return bool(enforced & {"all", *words})

    def limits_of(self, request: Request) -> Limits:
        """Return the limits of the job's QOS."""
        if self.accounting is None:
            return Limits()
        return self.accounting.qos.get(request.qos or default_qos(self.own(request)), Limits())

    def with_defaults(self, request: Request) -> Request:
        """Return the request with its default account and QOS; "" without accounting."""
        if self.accounting is None:
            return request
        account = request.account or self.accounting.default_account
        return replace(request, account=account, qos=request.qos or default_qos(self.own(request)))

    def own(self, request: Request) -> list[Association]:
        """Return the associations for a job, those with a partition first."""
        if self.accounting is None:
            return []
        account = request.account or self.accounting.default_account
        names = {one.name for one in self.candidates(request)}
        of_account = [one for one in self.accounting.associations if one.account == account]
        return sorted(
            (one for one in of_account if not one.partition or one.partition in names),
            key=lambda one: not one.partition,
        )

    def chosen(self, request: Request) -> list[PartitionLimits]:
        """Return the partitions of a job: those that it names, else the default one."""
        if request.partitions:
            return [self.partitions[name] for name in request.partitions if name in self.partitions]
        return [one for one in self.partitions.values() if one.is_default]

    def candidates(self, request: Request) -> list[PartitionLimits]:
        """Return the chosen partitions; if there are none, all partitions, the default first."""
        return self.chosen(request) or sorted(self.partitions.values(), key=lambda one: not one.is_default)


def default_qos(mine: Sequence[Association]) -> str:
    """Return slurmctld's QOS for a job that names none: the association's default, else its only one, else `normal`."""
    if not mine:
        return "normal"
    return mine[0].default_qos or (mine[0].qos[0] if len(mine[0].qos) == 1 else "normal")


def ask_cluster(slurm: Slurm, request: Request) -> Cluster:
    """Query all facts that the checks of a request need."""
    slurm = replace(slurm, timeout_s=min(slurm.timeout_s, PATIENCE_S))
    with ThreadPoolExecutor(max_workers=5, thread_name_prefix="preflight") as pool:
        settings, partitions = pool.submit(cluster_settings, slurm), pool.submit(every_partition, slurm)
        cluster = Cluster(settings.result(), partitions.result())
        questions = _Questions(pool)
        names = ",".join(one.name for one in cluster.candidates(request))
        shapes = questions.ask("nodes", node_shapes, slurm, names) if names else _nothing
        name = request.reservation
        reserved = questions.ask(f"reservation {name}", reservations, slurm, name) if name else _nothing
        accounting = _ask_accounting(questions, slurm, cluster)
        cluster = replace(cluster, shapes=shapes(), reservations=reserved(), accounting=accounting())
    return replace(cluster, silent=tuple(questions.silent))


def _ask_accounting(questions: _Questions, slurm: Slurm, cluster: Cluster) -> Callable[[], Accounting | None]:
    """Start the accounting queries if Slurm enforces accounting; the returned function waits for them."""
    if not cluster.enforces("associations", "limits", "qos", "safe"):
        return _nothing
    user = getpass.getuser()
    account = questions.ask("default account", default_account, slurm, user, cluster.settings["ClusterName"])
    rights = questions.ask("associations", associations_of, slurm, user, cluster.settings["ClusterName"])
    limits = questions.ask("QOS", every_qos, slurm)
    queue = questions.ask("your jobs in the queue", queued_jobs, slurm, user)

    def answer() -> Accounting | None:
        default, associations, qos, queued = account(), rights(), limits(), queue()
        if default is None or associations is None or qos is None:
            return None
        return Accounting(user, default, associations, qos, queued)

    return answer


@dataclass
class _Questions:
    """Queries in progress; a failed one is recorded in `silent`."""

    pool: ThreadPoolExecutor
    silent: list[str] = field(default_factory=list)

    def ask(self, name: str, question: Callable[..., T], *arguments: object) -> Callable[[], T | None]:
        """Start a query; the returned function waits for its result, which is None if the query failed."""
        future = self.pool.submit(question, *arguments)

        def answer() -> T | None:
            try:
                return future.result()
            except (NotFoundError, SchedulerRefusedError) as error:
                self.silent.append(f"{name}: {error.message}")
                return None

        return answer


def _nothing() -> None:
    """Return the result of a query that was not made."""
