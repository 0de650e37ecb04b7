"""Queries to the cluster: one cheap query for each fact; independent queries run at the same time."""

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

__all__ = ["Accounting", "Cluster", "ask_cluster", "default_qos"]

T = TypeVar("T")
PATIENCE_S = 5.0  # for one answer; a submission must not wait for a cluster that is busy


@dataclass(frozen=True)
class Accounting:
    """What accounting allows this user, and how much of it is in the queue; None if squeue did not answer."""

    user: str
    default_account: str
    associations: Sequence[Association]
    qos: Mapping[str, Limits]
    queued: Sequence[QueuedJob] | None = ()

    def queued_against(self, whose: str, mine: Association) -> int:
        """How many of the user's jobs in the queue count against a QOS, or against the association `mine`."""
        return sum(
            whose == f"QOS {one.qos}" or (whose == f"account {one.account}" and mine.partition in ("", one.partition))
            for one in self.queued or ()
        )


@dataclass(frozen=True)
class Cluster:
    """What the cluster answered; None for what it was not asked, or did not say. `silent` says why."""

    settings: Mapping[str, str]
    partitions: Mapping[str, PartitionLimits]
    shapes: Sequence[NodeShape] | None = None
    reservations: Sequence[Reservation] | None = None  # of the name that the job gives
    accounting: Accounting | None = None
    silent: Sequence[str] = field(default_factory=tuple)

    def enforces(self, *words: str) -> bool:
        """Whether AccountingStorageEnforce has one of some words, or all of it."""
        enforced = set(self.settings.get("AccountingStorageEnforce", "").lower().split(","))
        return bool(enforced & {"all", *words})

    def limits_of(self, request: Request) -> Limits:
        """Those of the QOS that a job names or is given."""
        if self.accounting is None:
            return Limits()
        return self.accounting.qos.get(request.qos or default_qos(self.own(request)), Limits())

    def with_defaults(self, request: Request) -> Request:
        """The request with the account and the QOS that it is charged to where it names none; "" without accounting."""
        if self.accounting is None:
            return request
        account = request.account or self.accounting.default_account
        return replace(request, account=account, qos=request.qos or default_qos(self.own(request)))

    def own(self, request: Request) -> list[Association]:
        """The associations that a job may be charged to: those of a partition come before those of all."""
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
        """The partitions that a job may run in: those that it names, else the default one."""
        if request.partitions:
            return [self.partitions[name] for name in request.partitions if name in self.partitions]
        return [one for one in self.partitions.values() if one.is_default]

    def candidates(self, request: Request) -> list[PartitionLimits]:
        """The chosen partitions; where there is none, any may be meant, the default one first."""
        return self.chosen(request) or sorted(self.partitions.values(), key=lambda one: not one.is_default)


def default_qos(mine: Sequence[Association]) -> str:
    """The QOS that slurmctld takes where none is named: the association's default, its only one, else `normal`."""
    if not mine:
        return "normal"
    return mine[0].default_qos or (mine[0].qos[0] if len(mine[0].qos) == 1 else "normal")


def ask_cluster(slurm: Slurm, request: Request) -> Cluster:
    """Ask what the checks of a request need.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not answer at all.
    """
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
    """Ask the database, where Slurm goes by it."""
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
    """Questions on their way; what has no answer is remembered and gone past."""

    pool: ThreadPoolExecutor
    silent: list[str] = field(default_factory=list)

    def ask(self, name: str, question: Callable[..., T], *arguments: object) -> Callable[[], T | None]:
        """Ask now; what is returned waits for the answer."""
        future = self.pool.submit(question, *arguments)

        def answer() -> T | None:
            try:
                return future.result()
            except (NotFoundError, SchedulerRefusedError) as error:
                self.silent.append(f"{name}: {error.message}")
                return None

        return answer


def _nothing() -> None:
    """The answer to what was not asked."""
