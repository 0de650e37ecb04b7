"""Verify a site file with a short probe job in each partition, whose ranks report what they find."""

import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.document import Flag
from toolkit.config.request import expand_path, resolve_job
from toolkit.config.shipped import find_job, site_files
from toolkit.config.site import PartitionTable, Site
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError
from toolkit.rundir.files import runs_folder
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.explain.explain import explain_run
from toolkit.runs.follow.follow import Follower
from toolkit.runs.requests.cancel import cancel_run
from toolkit.runs.status.state_table import RunStatus
from toolkit.site.findings import BAD, Finding, Probe, Report, judge_limits, judge_reports
from toolkit.site.proof import Proof, make_proof
from toolkit.slurm.cluster import ClusterFacts, closed_by, cluster_facts
from toolkit.slurm.commands import slurm_of_site
from toolkit.slurm.limits import PartitionLimits
from toolkit.slurm.times import format_slurm_time
from toolkit.submission.create import make_run, submit_new

__all__ = ["Wanted", "check_site"]

LINE = "site-probe: "  # prefix of the lines that jobs/site_probe.py prints
NODES, RANKS_PER_NODE = 2, 2
LOOK_PERIOD_S = 1.0


@dataclass(frozen=True)
class Wanted:
    """The options of `site check`: partitions (none means all), account, walltime of the probes, RUNS, and the longest
    wait for the probes.
    """

    partitions: Sequence[str] = ()
    account: str = ""
    time: str = ""
    runs: Path | None = None
    wait_s: float = 600.0


@dataclass
class _Begun:
    """The probe job of one partition."""

    probe: Probe
    run: RunDirectory
    follower: Follower
    time_s: int | None

    @property
    def shared_file(self) -> Path:
        """The file that rank 0 of the probe writes for the other ranks."""
        return Path(self.probe.folder) / f".site-probe-{self.probe.token}"


def check_site(site: Site, wanted: Wanted, tell: Callable[[str], object]) -> Proof:
    """Probe all partitions of a site concurrently; `tell` receives progress messages.

    Partitions may share nodes, so that probes preempt each other. Preempted probes are submitted again when the others
    have ended, as long as each round completes at least one probe.

    Raises:
        ToolkitError: the site has no scheduler, or no partition with a requested name.
        NotFoundError, SchedulerRefusedError: Slurm does not respond.
    """
    if site.scheduler.kind == "local":
        raise ToolkitError(f"site {site.name} has no scheduler to check", fix="`toolkit run mpi_hello` tests this host")
    cluster = cluster_facts(slurm_of_site(site.scheduler))
    found: dict[str, list[Finding]] = {}
    lives: list[PartitionLimits] = []
    for name in _names(site, wanted, cluster):
        live, message = cluster.partitions.get(name), site.partitions.get(name, PartitionTable())
        found[name] = [judge_limits(name, message, live, cluster.nodes_of(name))]
        lives += [live] if live is not None else []
    while lives:
        begun = [one for live in lives if (one := _begin(site, wanted, live, found[live.name], tell))]
        ended = _await_all(site, begun, wanted, tell)
        taken = {name for name, findings in ended if findings is None}
        for name, findings in ended:
            if findings is not None:
                found[name] += findings
            elif len(taken) == len(begun):  # every probe was preempted, so other jobs use the nodes
                found[name].append(_taken_by_others(site, name))
        lives = [live for live in lives if live.name in taken] if len(taken) < len(begun) else []
    return make_proof(site, slurm=cluster.version, cluster=cluster.name, partitions=found)


def _taken_by_others(site: Site, name: str) -> Finding:
    return Finding(
        "ranks", "unknown", "other jobs preempted the probe",
        f"when the cluster is less busy, run `toolkit site check {_name_of(site)} --partition {name}`",
    )  # fmt: skip


def _name_of(site: Site) -> str:
    """Return the site argument for a command: its name, or its file if the name refers to another file."""
    known = site_files().get(site.name)
    return site.name if known is not None and known.resolve() == site.file.resolve() else shlex.quote(str(site.file))


def _names(site: Site, wanted: Wanted, cluster: ClusterFacts) -> list[str]:
    """Return the partitions to probe: the requested ones, else the site file's, else all that are up and open."""
    open_ones = [one.name for one in cluster.partitions.values() if one.state == "UP" and not closed_by(one)]
    known = list(site.partitions) or open_ones
    for name in wanted.partitions:
        if name not in known:
            raise NotFoundError(
                f"partition {name!r} not found at site {site.name}", fix=f"use --partition {' or '.join(known)}"
            )
    return list(wanted.partitions) or known


def _begin(
    site: Site, wanted: Wanted, live: PartitionLimits, findings: list[Finding], tell: Callable[[str], object]
) -> _Begun | None:
    """Submit the probe of one partition. A failed submission is recorded as a finding."""
    if live.state != "UP":
        findings.append(Finding("ranks", "unknown", f"the partition is {live.state}", "repeat the check when it is up"))
        return None
    limits = site.partitions.get(live.name, PartitionTable())
    most = min(filter(None, (limits.max_nodes, live.max_nodes, live.total_nodes)), default=1)
    nodes = max(min(NODES, most), live.min_nodes)
    token, runs = secrets.token_hex(6), runs_folder(wanted.runs, os.environ, site.paths.runs)
    flags = {
        "job.partition": Flag(live.name, "--partition"),
        "job.nodes": Flag(nodes, "-N"),
        **({"job.account": Flag(wanted.account, "-A")} if wanted.account else {}),
        **({"job.time": Flag(wanted.time, "-t")} if wanted.time else {}),
    }
    try:
        folder = _shared_folder(site, runs)
        job = resolve_job(
            find_job("site_probe"), site=site, environ=os.environ, flags=flags,
            argv=["--token", token, "--folder", str(folder)],
        )  # fmt: skip
        run = make_run(job, runs)
        submitted = submit_new(run, job)
    except ToolkitError as error:
        findings.append(Finding("ranks", "unknown", f"not submitted: {error.message}", error.fix))
        return None
    tell(f"{live.name}: job {submitted.job_id}, run {run.run_id}")
    probe = Probe(live.name, nodes, RANKS_PER_NODE, job.job.gpus_per_node, token, str(folder))
    return _Begun(probe, run, Follower(run), job.job.time_s)


def _shared_folder(site: Site, runs: Path) -> Path:
    """Return the folder that the probe expects to be shared between nodes: the site's scratch, else RUNS."""
    scratch = expand_path(site, "scratch", os.environ)
    return Path(scratch) if scratch else runs


def _await_all(
    site: Site, begun: Sequence[_Begun], wanted: Wanted, tell: Callable[[str], object]
) -> list[tuple[str, list[Finding] | None]]:
    """Follow all probes until they end. Cancel those that are late or can never start, and all of them on Ctrl-C.

    The findings of a preempted probe are None.
    """
    open_ones: list[_Begun] = list(begun)
    done: list[tuple[str, list[Finding] | None]] = []
    deadline = time.monotonic() + wanted.wait_s
    try:
        while open_ones:
            for one in list(open_ones):
                if one.follower.is_over():
                    findings: list[Finding] | None = _judge(site, one, one.follower.look())
                elif time.monotonic() > deadline or one.follower.look().cannot_start:
                    findings = [_give_up(one, one.follower.look(), wanted.wait_s)]
                else:
                    continue
                open_ones.remove(one)
                one.shared_file.unlink(missing_ok=True)
                tell(f"{one.probe.partition}: {_in_words(findings)}")
                done.append((one.probe.partition, findings))
            if open_ones:
                time.sleep(LOOK_PERIOD_S)
    except KeyboardInterrupt:
        for one in open_ones:
            _cancel(one)
            one.shared_file.unlink(missing_ok=True)
        raise
    return done


def _in_words(findings: Sequence[Finding] | None) -> str:
    if findings is None:
        return "preempted"
    bad = [finding.check for finding in findings if finding.state in BAD]
    return f"failed: {', '.join(bad)}" if bad else "passed"


def _give_up(one: _Begun, status: RunStatus, wait_s: float) -> Finding:
    _cancel(one)
    why = "can never start" if status.cannot_start else f"had not ended after {wait_s:.0f} s"
    return Finding(
        "ranks", "unknown", f"the probe {why}, and was cancelled: {status.reason}",
        "repeat the check when the partition is less busy, with a longer --wait, or with -A ACCOUNT",
    )  # fmt: skip


def _cancel(one: _Begun) -> None:
    with suppress(CheckFailedError):  # the run has just ended
        cancel_run(one.run)


def _judge(site: Site, one: _Begun, status: RunStatus) -> list[Finding] | None:
    """Return findings from the reports of the ranks, or from the failure of the run if reports are missing.

    A probe that ran out of time proves nothing. For a preempted probe, the result is None.
    """
    reports = _reports(one)
    if len(reports) == one.probe.ranks:
        return judge_reports(one.probe, site, reports)
    if status.state is RunState.PREEMPTED:
        return None
    if status.state is RunState.TIMEOUT:
        limit, name = format_slurm_time(one.time_s), one.probe.partition
        message = f"only {len(reports)} of {one.probe.ranks} ranks had reported at the time limit of the probe, {limit}"
        return [
            Finding(
                "ranks",
                "unknown",
                message,
                f"allow more time: `toolkit site check {_name_of(site)} --partition {name} -t 10`",
            )
        ]
    explanation = explain_run(one.run)
    why = " ".join(explanation.why.split())
    message = f"only {len(reports)} of {one.probe.ranks} ranks reported, and the run is {status.state.value}: {why}"
    return [
        Finding(
            "ranks",
            "failed",
            message,
            "; ".join([*explanation.actions[:1], f"`toolkit explain {one.run.path}` shows details"]),
        )
    ]


def _reports(one: _Begun) -> list[Report]:
    attempt = one.run.last_attempt()
    if attempt is None:
        return []
    found: list[Report] = []
    for rank in range(one.probe.ranks):
        path = attempt.log_file(rank)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        found += [json.loads(line.removeprefix(LINE)) for line in lines if line.startswith(LINE)][-1:]
    return found
