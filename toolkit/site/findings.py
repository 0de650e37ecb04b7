"""Evaluate the reports from the ranks of a probe job, which `toolkit site check` submits to verify a site file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config.site import PartitionTable, Site
from toolkit.slurm.cluster import Node
from toolkit.slurm.limits import PartitionLimits
from toolkit.slurm.times import format_slurm_time

__all__ = ["BAD", "Finding", "Probe", "Report", "judge_limits", "judge_reports"]

CLOCKS_APART_S = 5.0
BAD = ("failed", "unknown")  # a partition with a finding in one of these states does not pass

Report = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """The result of one check of one partition; `fix` is set if it failed. State `unknown`: the probe did not run."""

    check: str
    state: Literal["passed", "failed", "skipped", "unknown"]
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """The probe job for a partition: nodes, ranks and GPUs per node, and the token that rank 0 writes to a shared file."""

    partition: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    token: str
    folder: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def judge_reports(probe: Probe, site: Site, reports: Sequence[Report]) -> list[Finding]:
    """Return the findings from `reports`, which contains one report per rank."""
    checks: tuple[Callable[[Probe, Site, Sequence[Report]], Finding], ...] = (
        _ranks, _mpi, _library, _gpus, _network, _shared, _clocks,
    )  # fmt: skip
    return [check(probe, site, reports) for check in checks]


def judge_limits(
    name: str, stated: PartitionTable, live: PartitionLimits | None, nodes: Sequence[Node] = ()
) -> Finding:
    """Check that the values in the site file do not exceed the limits in Slurm."""
    if live is None:
        return Finding(
            "limits",
            "failed",
            "the partition does not exist in Slurm",
            f"remove [partitions.{name}] from the site file",
        )
    wrong = list(_promised(stated, live, nodes))
    if wrong:
        details, fixes = zip(*wrong, strict=True)
        return Finding("limits", "failed", "; ".join(details), f"[partitions.{name}] {', '.join(fixes)}")
    return Finding("limits", "passed", "the values in the site file are within the limits of Slurm")


def _promised(stated: PartitionTable, live: PartitionLimits, nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each key that exceeds the value in Slurm."""
    most = {
        "max_nodes": live.max_nodes or live.total_nodes,
        "cpus_per_node": max((node.cpus for node in nodes), default=0),
        "gpus_per_node": max((node.gpu_count for node in nodes), default=0),
        "mem_gb_per_node": max((node.memory_mb // 1024 for node in nodes), default=0),
    }
    for key, there in most.items():
        value = getattr(stated, key)
        if value > there and (nodes or key == "max_nodes"):
            yield f"{key} = {value}, but Slurm has {there}", f"{key} = {there}"
    limit_s = live.max_time_s
    if stated.max_time and limit_s is not None and (stated.max_time_s is None or stated.max_time_s > limit_s):
        longest = format_slurm_time(limit_s)
        yield f"max_time = {stated.max_time}, but Slurm allows {longest}", f'max_time = "{longest}"'


def _hosts(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(report["host"] for report in reports))


def _ranks(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    hosts = _hosts(reports)
    summary = f"{len(reports)} of {probe.ranks} ranks on {', '.join(hosts)}"
    if len(reports) == probe.ranks and len(hosts) == probe.nodes:
        return Finding("ranks", "passed", summary)
    return Finding(
        "ranks", "failed", f"{summary}, but {probe.nodes} nodes were requested",
        "check launcher.kind, and options in launcher.options and scheduler.options that change the placement of ranks",
    )  # fmt: skip


def _mpi(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    fix = "make launcher.mpi and launcher.libmpi compatible: `srun --mpi=list` shows the types that Slurm supports"
    for report in reports:
        mpi = report["mpi"]
        if mpi["error"]:
            return Finding("mpi", "failed", f"rank {report['rank']}: {mpi['error']}", fix)
        if mpi["size"] != probe.ranks:
            problem = f"MPI reports {mpi['size']} ranks, but the job has {probe.ranks}"
            return Finding("mpi", "failed", f"rank {report['rank']}: {problem}", fix)
        if mpi["sum"] != sum(range(probe.ranks)):
            problem = f"expected the sum {sum(range(probe.ranks))} over the ranks, got {mpi['sum']}"
            return Finding("mpi", "failed", f"rank {report['rank']}: {problem}", fix)
    return Finding("mpi", "passed", f"an all-reduce over {probe.ranks} ranks returned the correct sum")


def _library(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    names = sorted({report["mpi"]["library"] for report in reports})
    paths = sorted({report["mpi"]["path"] for report in reports if report["mpi"]["path"]})
    libraries = ", ".join([*names, *paths])
    if len(names) > 1:
        return Finding(
            "libmpi", "failed", f"ranks load different libraries: {libraries}", "choose one with launcher.libmpi"
        )
    if not names[0]:
        return Finding("libmpi", "skipped", "no rank has MPI")
    return Finding("libmpi", "passed", libraries)


def _gpus(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    asked = probe.gpus_per_node
    if not asked:
        return Finding("gpus", "skipped", "the site file lists no GPUs for the partition")
    fix = f"fix gpu.request, now {site.gpu.request!r}: `scontrol show node` shows the Gres of each node"
    for report in reports:
        seen, driver = report["gpus"]["visible"], report["gpus"]["driver"]
        if seen < asked:  # more GPUs are correct, because the node may be allocated exclusively
            return Finding("gpus", "failed", f"{report['host']} has {seen} of {asked} requested GPUs", fix)
        if driver is not None and driver < asked:
            problem = f"{report['host']}: the driver reports {driver} GPUs, but the job was allocated {asked}"
            return Finding(
                "gpus", "failed", problem, "report this node and the count of its driver to the administrators"
            )
    note = "" if any(report["gpus"]["driver"] is not None for report in reports) else "; not verified: no driver"
    return Finding("gpus", "passed", f"GPUs on each node: {asked}{note}")


def _network(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    wanted = site.network.interface
    for report in reports:
        names = report["interfaces"]
        if wanted and not any(name == wanted for name in names):
            return Finding(
                "network", "failed", f"{report['host']} does not have an interface {wanted} with an address; it has {', '.join(names) or 'none'}",
                f"set network.interface = \"{names[0] if names else ''}\"",
            )  # fmt: skip
    rates = [report["rate_mb_per_s"] for report in reports if report["rate_mb_per_s"]]
    if probe.nodes < 2:
        return Finding("network", "skipped", "requires at least two nodes")
    if any(report["mpi"]["error"] for report in reports):
        return Finding("network", "skipped", "not tested without MPI")
    if not rates:
        return Finding(
            "network",
            "failed",
            "no data could be sent between two nodes over MPI",
            "fix network.interface and network.vars",
        )
    return Finding("network", "passed", f"{rates[0]:.0f} MB/s between two ranks on two nodes, over MPI")


def _shared(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    blind = [report for report in reports if report["shared"] != probe.token]
    if not blind:
        return Finding("shared_path", "passed", f"{probe.folder} is the same on all nodes")
    hosts = ", ".join(_hosts(blind))
    return Finding(
        "shared_path", "failed", f"{hosts} cannot read the file that rank 0 wrote in {probe.folder}",
        "set paths.scratch and paths.runs to folders on a file system that all nodes share",
    )  # fmt: skip


def _clocks(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    """Compare the clocks of the ranks, which read them after a barrier; this requires MPI."""
    if any(report["mpi"]["error"] for report in reports):
        return Finding("clocks", "skipped", "not tested without MPI")
    times = [report["clock_s"] for report in reports]
    apart_s = max(times) - min(times)
    if apart_s > CLOCKS_APART_S:
        return Finding(
            "clocks", "failed", f"the clocks of the nodes differ by {apart_s:.0f} s",
            "check `chronyc tracking` on the nodes; report it to the administrators of the site",
        )  # fmt: skip
    return Finding("clocks", "passed", f"within {apart_s:.2f} s")
