"""Run all checks of a job before its submission."""

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.checks import beyond_limits
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import Site
from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError, all_of
from toolkit.metrics.verdicts import Severity
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.job import Request, request_of, sbatch_words, slurm_of, uses_slurm
from toolkit.slurm.commands import UnknownClusterError
from toolkit.slurm.sbatch_options import last_value_of, value_of
from toolkit.submission.preflight.accounts import against_accounts
from toolkit.submission.preflight.arguments import check_set_arguments
from toolkit.submission.preflight.cluster import Cluster, ask_cluster
from toolkit.submission.preflight.cost import Cost, cost_of, in_words, together
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.preflight.nodes import against_nodes
from toolkit.submission.preflight.options import according_to_sbatch, check_options
from toolkit.submission.preflight.partitions import against_partitions, against_reservation
from toolkit.submission.preflight.script_lines import check_script
from toolkit.submission.preflight.shape import against_array_limits, check_dependency, check_shape, check_sums
from toolkit.submission.preflight.storage import check_room, check_shared
from toolkit.terminal.talk import say

__all__ = ["FORCED", "RENDERED", "Preflight", "check_files", "look", "report_cost", "require_good"]

_LONGEST_SHEBANG = 256  # number of bytes that Linux reads (execve(2))
_ELF = b"\x7fELF"


def check_files(job: ResolvedJob, extra_sbatch_options: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield findings on files that this host can see; `extra_sbatch_options` apply to this submission only."""
    yield from _log_folders(About(job, "log_folder"), (*sbatch_words(job), *extra_sbatch_options), extra_sbatch_options)
    if isinstance(job.job.entry, list) and not (job.container.image or job.site_container.image):
        yield from _program(About(job, "program"), job.job.entry[0], job.job_directory)


def _log_folders(about: About, words: Sequence[str], extra_sbatch_options: Sequence[str]) -> Iterator[Finding]:
    """Yield findings on the folders in `-o` and `-e`. If one is missing, Slurm ends the job without a log."""
    at = Path(last_value_of(words, "chdir", "D") or ".")
    for name, letter in (("output", "o"), ("error", "e")):
        written = last_value_of(words, name, letter)
        folder = written.rpartition("/")[0]
        if not folder or "%" in folder or written.startswith("/dev/"):
            continue  # the submission directory, or a path that only Slurm can expand
        path = at / folder
        is_flag = any(value_of(word, name, letter) is not None for word in extra_sbatch_options)
        where = f"-{letter} {written}" if is_flag else "job.sbatch"
        if not path.is_dir():
            fix = f"mkdir -p {shlex.quote(str(path))}"
            yield about.refuse(where, f"there is no folder {path} for --{name}, and Slurm does not create it", fix)
        elif not os.access(path, os.W_OK | os.X_OK):
            yield about.refuse(where, f"you cannot write to {path}, the folder of --{name}", "choose another folder")


def _program(about: About, written: str, directory: Path) -> Iterator[Finding]:
    """Check a program that is given as a path; the nodes find a plain name through their PATH."""
    if "/" not in written:
        return
    path = directory / written
    if not path.exists():  # an absolute path, because a missing relative one was refused before
        yield about.warn("job.entry", f"file {path} not found on this host", "check that the file exists on the nodes")
        return
    if not path.is_file() or not os.access(path, os.X_OK):
        fix = f"chmod +x {shlex.quote(str(path))}" if path.is_file() else "specify an executable file"
        yield about.refuse("job.entry", f"{path} is not executable", fix)
        return
    try:
        with path.open("rb") as stream:
            first = stream.read(_LONGEST_SHEBANG)
    except OSError:  # it may be executable without being readable
        return
    if first.startswith(b"#!"):
        yield from _interpreter(about, path, first)
    elif not first.startswith(_ELF):
        yield about.refuse(
            "job.entry",
            f"{path} is not an executable program: it has no #! line and is not an ELF file",
            'add a first line such as "#!/bin/bash"',
        )


def _interpreter(about: About, path: Path, first: bytes) -> Iterator[Finding]:
    line = first.partition(b"\n")[0].decode("utf-8", "replace")
    if line.endswith("\r"):
        yield about.refuse(
            "job.entry",
            f"{path} has Windows line endings, with which Linux does not find its interpreter",
            f"sed -i 's/\\r$//' {shlex.quote(str(path))}",
        )
        return
    words = line.removeprefix("#!").split()
    if not words:
        yield about.refuse("job.entry", f"the #! line of {path} names no interpreter", 'write "#!/bin/bash"')
    elif not Path(words[0]).is_absolute() or shutil.which(words[0]) is None:
        yield about.refuse(
            "job.entry", f"the interpreter of {path}, {words[0]}, is not on this host", "correct its #! line"
        )


@dataclass(frozen=True)
class Preflight:
    """The findings, refusals first. `silent` lists the facts that the cluster did not report, each with the reason.

    `is_final` is true if there is no cluster to submit to; --force then cannot override the refusals.
    """

    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    cost: Cost | None
    is_final: bool = False

    @property
    def refusals(self) -> list[Finding]:
        return [one for one in self.findings if one.severity is Severity.CRITICAL]

    @property
    def warnings(self) -> list[Finding]:
        return [one for one in self.findings if one.severity is Severity.WARNING]

    def as_json(self) -> dict[str, Any]:
        """The documented JSON of `preflight --json`."""
        return {
            "good": not self.refusals,
            "findings": [one.as_json() for one in self.findings],
            "not_answered": list(self.silent),
            "cost": None if self.cost is None else self.cost.as_json(),
        }


def look(
    job: ResolvedJob,
    runs: Path | None,
    *,
    site: Site | None = None,
    extra_sbatch_options: Sequence[str] = (),
    run: RunDirectory | None = None,
    with_sbatch: bool = False,
    swept: Mapping[str, str] | None = None,
    recorded: Path | None = None,
) -> Preflight:
    """Check a job and, if it is submitted to Slurm, the cluster.

    Args:
        runs: the folder of run directories; None for a session, which only allocates nodes.
        site: the site whose limits are checked; None if the job was checked against them already.
        extra_sbatch_options: sbatch options for this submission only.
        run: the run that the job continues.
        with_sbatch: whether to query sbatch, too, if no check rejects the job. `submit` calls sbatch anyway.
        swept: the place of each swept key.
        recorded: the copy of the job file of the run that the job continues or repeats.
    """
    requests = [(one, request_of(one, extra_sbatch_options)) for one in job.components]
    found = [finding for one, request in requests for finding in check_shape(one, request)]
    found += [
        *check_script(job),
        *check_set_arguments(job, swept, recorded),
        *check_dependency(job, extra_sbatch_options),
    ]
    if runs is not None:
        found += [*check_files(job, extra_sbatch_options), *check_room(job, runs, run)]
    if not uses_slurm(job):
        return Preflight(_ordered(found), (), None)
    found += [finding for one in job.components for finding in check_options(one, extra_sbatch_options)]
    costs: list[Cost] = []
    silent: list[str] = []
    past_time = past_partition = False
    for one, request in requests:
        try:
            cluster, unanswered = _ask(one, request)
        except UnknownClusterError as error:
            found.append(About(job, "cluster").refuse("job.cluster", error.message, error.fix))
            return Preflight(_ordered(found), (), None, is_final=True)
        silent += unanswered
        costs.append(cost_of(one, request, cluster))
        if runs is not None:
            found += check_shared(one, runs, cluster)
        if cluster is not None:
            found += _against_cluster(one, request, cluster)
            found += check_sums(job, [asked for _, asked in requests], cluster)
            past_time |= "PartitionTimeLimit" in cluster.limits_of(request).flags
            past_partition |= any(flag.startswith("Partition") for flag in cluster.limits_of(request).flags)
    if site is not None:
        found += _of_site_file(job, site, found, past_time=past_time)
    # `sbatch --test-only` ignores that a QOS may override limits of its partition.
    if with_sbatch and not job.component and not past_partition and not _is_judged(found):
        refusals, unanswered = according_to_sbatch(job, extra_sbatch_options)
        found += refusals
        silent += unanswered
    cost = together(costs)
    if runs is None:
        cost = replace(cost, goes_on=False)  # a session is never requeued
    return Preflight(_ordered(found), tuple(dict.fromkeys(silent)), cost)


def _is_judged(found: Sequence[Finding]) -> bool:
    """Return whether a check rejects the job, or expects it to wait for nodes that sbatch would reject today."""
    waits = ("nodes", "partition")
    return any(
        one.severity is Severity.CRITICAL or (one.severity is Severity.WARNING and one.check in waits) for one in found
    )


def _ask(job: ResolvedJob, request: Request) -> tuple[Cluster | None, Sequence[str]]:
    try:
        cluster = ask_cluster(slurm_of(job), request)
    except UnknownClusterError:
        raise
    except (NotFoundError, SchedulerRefusedError) as error:
        return None, (f"the cluster: {error.message}",)
    return cluster, cluster.silent


def _against_cluster(job: ResolvedJob, request: Request, cluster: Cluster) -> Iterator[Finding]:
    of_partitions = against_partitions(job, request, cluster)
    yield from of_partitions
    known = {one.where for one in of_partitions}
    # Report one limit per key: that of the partition, if it and the nodes both refuse the value.
    yield from (one for one in against_nodes(job, request, cluster) if one.where not in known)
    yield from against_reservation(job, request, cluster)
    yield from against_array_limits(job, cluster.settings)
    yield from against_accounts(job, request, cluster)


def _of_site_file(job: ResolvedJob, site: Site, found: Sequence[Finding], *, past_time: bool) -> list[Finding]:
    """Return the refusals by limits of the site file, except for values that the cluster already refuses.

    `past_time` is true if the QOS of the job overrides the time limit of the partition.
    """
    told = {one.where for one in found if one.severity is Severity.CRITICAL}
    if past_time:
        told.add(job.origin("job.time").place("job.time"))
    return [
        Finding("site_limits", Severity.CRITICAL, error.where, error.message, error.fix)
        for error in beyond_limits(job, site)
        if error.where not in told
    ]


def _ordered(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity; one that several components share is reported once."""
    return tuple(one for severity in reversed(Severity) for one in dict.fromkeys(found) if one.severity is severity)


# The prefix of a refusal that does not end the command.
FORCED = "overridden (--force)"


RENDERED = "submit would refuse"


def require_good(found: Preflight, *, instead: str = "", action: str = "submits it") -> Cost | None:
    """Report on stderr what preflight found; return the cost, which the caller may pass to `report_cost`.

    Args:
        instead: if not "", refusals are only reported, with this prefix.
        action: what --force does despite the refusals, in words.

    Raises:
        ToolkitError: the job can never run; the message has one line per refusal.
    """
    for one in found.silent:
        say(f"could not check {one}")
    for finding in found.warnings:
        say(f"warning: {finding.as_error()}")
    refusals = found.refusals
    if refusals and found.is_final and instead != RENDERED:
        raise _all_of(refusals)
    if refusals and not instead:
        raise _all_of(refusals, way_past=f"; --force {action} anyway")
    for finding in refusals:
        say(f"{instead}: {finding.as_error()}")
    return found.cost


def report_cost(cost: Cost | None) -> None:
    """Report on stderr what a submitted job may cost."""
    if cost is not None:
        say(in_words(cost))


def _all_of(found: Sequence[Finding], *, way_past: str = "") -> ToolkitError:
    """Return all refusals, a line each; the last line says how to override them, if that is possible."""
    *before, last = [one.as_error() for one in found]
    last = ToolkitError(last.message, where=last.where, fix=f"{last.fix}{way_past}")
    return all_of([*before, last])
