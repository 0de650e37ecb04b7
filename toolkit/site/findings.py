"""What the ranks of a probe job reported, evaluated: each check passed or failed, with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config.site import PartitionTable, Site
from toolkit.slurm.cluster import Node
from toolkit.slurm.limits import PartitionLimits
from toolkit.slurm.times import format_slurm_time

CLOCKS_APART_S = 5.0
BAD = ("failed", "unknown")  # states of a finding that do not let a partition pass

Report = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One check of one partition; a failed one has a fix. `unknown`: the probe did not run."""

    check: str
    state: Literal["passed", "failed", "skipped", "unknown"]
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """What was asked of Slurm for a partition: nodes, ranks and GPUs on each of them, and the token of the shared file."""

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
    """Judge what all ranks reported; `reports` holds one of each rank."""
    checks: tuple[Callable[[Probe, Site, Sequence[Report]], Finding], ...] = (
        _ranks, _mpi, _library, _gpus, _network, _shared, _clocks,
    )  # fmt: skip
    return [check(probe, site, reports) for check in checks]


def judge_limits(name: str, said: PartitionTable, live: PartitionLimits | None, nodes: Sequence[Node] = ()) -> Finding:
    """Does the site file promise what Slurm would refuse?"""
    if live is None:
        return Finding(
            "limits", "failed", "Slurm has no such partition", f"take [partitions.{name}] out of the site file"
        )
    wrong = list(_promised(said, live, nodes))
    if wrong:
        details, fixes = zip(*wrong, strict=True)
        return Finding("limits", "failed", "; ".join(details), f"[partitions.{name}] {', '.join(fixes)}")
    return Finding("limits", "passed", "nothing in the site file is more than Slurm gives")


def _promised(said: PartitionTable, live: PartitionLimits, nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Each key that says more than Slurm does, with the value that fits."""
    most = {
        "max_nodes": live.max_nodes or live.total_nodes,
        "cpus_per_node": max((node.cpus for node in nodes), default=0),
        "gpus_per_node": max((node.gpu_count for node in nodes), default=0),
        "mem_gb_per_node": max((node.memory_mb // 1024 for node in nodes), default=0),
    }
    for key, there in most.items():
        value = getattr(said, key)
        if value > there and (nodes or key == "max_nodes"):
            yield f"{key} = {value}, and Slurm has {there}", f"{key} = {there}"
    limit_s = live.max_time_s
    if said.max_time and limit_s is not None and (said.max_time_s is None or said.max_time_s > limit_s):
        told = format_slurm_time(limit_s)
        yield f"max_time = {said.max_time}, and Slurm gives {told}", f'max_time = "{told}"'


def _hosts(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(report["host"] for report in reports))


def _ranks(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    hosts = _hosts(reports)
    told = f"{len(reports)} of {probe.ranks} ranks on {', '.join(hosts)}"
    if len(reports) == probe.ranks and len(hosts) == probe.nodes:
        return Finding("ranks", "passed", told)
    return Finding(
        "ranks", "failed", f"{told}, and {probe.nodes} nodes were asked for",
        "launcher.kind, or an option in launcher.options or scheduler.options that moves ranks",
    )  # fmt: skip


def _mpi(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    fix = "launcher.mpi and launcher.libmpi must fit each other: `srun --mpi=list` shows what Slurm speaks"
    for report in reports:
        mpi = report["mpi"]
        if mpi["error"]:
            return Finding("mpi", "failed", f"rank {report['rank']}: {mpi['error']}", fix)
        if mpi["size"] != probe.ranks:
            said = f"MPI says {mpi['size']} ranks, the job has {probe.ranks}"
            return Finding("mpi", "failed", f"rank {report['rank']}: {said}", fix)
        if mpi["sum"] != sum(range(probe.ranks)):
            said = f"the ranks' sum is {mpi['sum']}, not {sum(range(probe.ranks))}"
            return Finding("mpi", "failed", f"rank {report['rank']}: {said}", fix)
    return Finding("mpi", "passed", f"an all-reduce of {probe.ranks} ranks is right")


def _library(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    names = sorted({report["mpi"]["library"] for report in reports})
    paths = sorted({report["mpi"]["path"] for report in reports if report["mpi"]["path"]})
    told = ", ".join([*names, *paths])
    if len(names) > 1:
        return Finding("libmpi", "failed", f"ranks have different libraries: {told}", "pin one with launcher.libmpi")
    if not names[0]:
        return Finding("libmpi", "skipped", "no rank has MPI")
    return Finding("libmpi", "passed", told)


def _gpus(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    asked = probe.gpus_per_node
    if not asked:
        return Finding("gpus", "skipped", "the partition has none in the site file")
    fix = f"gpu.request, now {site.gpu.request!r}: `scontrol show node` shows each node's Gres"
    for report in reports:
        seen, driver = report["gpus"]["visible"], report["gpus"]["driver"]
        if seen < asked:  # a node that is given whole may show more
            return Finding("gpus", "failed", f"{report['host']} was given {seen} of {asked} GPUs", fix)
        if driver is not None and driver < asked:
            said = f"{report['host']}: the driver knows {driver} GPUs, the job was given {asked}"
            return Finding("gpus", "failed", said, "the node's driver; tell the site's administrators")
    known = any(report["gpus"]["driver"] is not None for report in reports)
    return Finding("gpus", "passed", f"{asked} on each node" + ("" if known else "; no driver was there to count them"))


def _network(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    wanted = site.network.interface
    for report in reports:
        names = report["interfaces"]
        if wanted and not any(name == wanted for name in names):
            return Finding(
                "network", "failed", f"{report['host']} has no {wanted} with an address, but {', '.join(names) or 'none'}",
                f"network.interface = \"{names[0] if names else ''}\"",
            )  # fmt: skip
    rates = [report["rate_mb_per_s"] for report in reports if report["rate_mb_per_s"]]
    if probe.nodes < 2:
        return Finding("network", "skipped", "one node has no network between nodes")
    if any(report["mpi"]["error"] for report in reports):
        return Finding("network", "skipped", "without MPI nothing is sent")
    if not rates:
        return Finding(
            "network",
            "failed",
            "nothing came from one node to the other over MPI",
            "network.interface and network.vars",
        )
    return Finding("network", "passed", f"{rates[0]:.0f} MB/s between two ranks on two nodes, over MPI")


def _shared(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    blind = [report for report in reports if report["shared"] != probe.token]
    if not blind:
        return Finding("shared_path", "passed", f"{probe.folder} is the same on all nodes")
    hosts = ", ".join(_hosts(blind))
    return Finding(
        "shared_path", "failed", f"{hosts} cannot read what rank 0 wrote into {probe.folder}",
        "paths.scratch and paths.runs must lie where all nodes see them",
    )  # fmt: skip


def _clocks(probe: Probe, site: Site, reports: Sequence[Report]) -> Finding:
    """Read behind a barrier; without MPI they were read at different times."""
    if any(report["mpi"]["error"] for report in reports):
        return Finding("clocks", "skipped", "without MPI the ranks read them at different times")
    times = [report["clock_s"] for report in reports]
    apart_s = max(times) - min(times)
    if apart_s > CLOCKS_APART_S:
        return Finding(
            "clocks", "failed", f"the nodes' clocks are {apart_s:.0f} s apart",
            "`chronyc tracking` on the nodes; tell the site's administrators",
        )  # fmt: skip
    return Finding("clocks", "passed", f"within {apart_s:.2f} s")
