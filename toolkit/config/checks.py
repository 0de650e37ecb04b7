"""Can the site serve this job? Requests that Slurm would refuse, or leave pending for ever, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.component_checks import check_components
from toolkit.config.derive import is_elsewhere
from toolkit.config.layout_checks import check_layout
from toolkit.config.needs import check_needs
from toolkit.config.refusal import refuse
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import PartitionTable, Site
from toolkit.config.table import nearest
from toolkit.config.values import no_start, no_text, no_word
from toolkit.errors import ToolkitError, all_of, counted
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.times import format_slurm_time, meant_as_hours, parse_slurm_time


def check_request(
    resolved: ResolvedJob, site: Site, *, limits: bool = True, anew: frozenset[str] = frozenset()
) -> None:
    """Check the job against its partition and against itself.

    Without `limits` the caller checks the partition's limits on the cluster itself; `anew` are the keys that were set
    over those of a record.

    Raises:
        ToolkitError: the request is impossible; the message has both numbers and the fix one that works.
    """
    check_components(resolved)
    if site.scheduler.kind == "local":
        _check_without_scheduler(resolved)
    else:
        for one in resolved.components:
            _check_nodelist(one)
        if limits and (beyond := beyond_limits(resolved, site)):
            raise all_of(beyond)
    _check_repeat(resolved)
    for one in resolved.components:
        _check_warning(one)
    _check_container(resolved)
    check_needs(resolved, anew)
    try:
        check_layout(resolved)
    except ToolkitError:
        for one in resolved.components:
            for unknown in _unknown_partition(one, site):  # it would have GPUs, and so the job other ranks
                raise unknown from None
        raise


def beyond_limits(resolved: ResolvedJob, site: Site) -> list[ToolkitError]:
    """Every request of the job's components beyond the limits of their partitions in the site file."""
    found = [error for one in resolved.components for error in _beyond_limits(one, site)]
    return list({str(error): error for error in found}.values())  # what [job] says for all is told once


def _beyond_limits(resolved: ResolvedJob, site: Site) -> list[ToolkitError]:
    limits = resolved.partition_limits
    if limits is None or site.scheduler.kind == "local":
        return list(_unknown_partition(resolved, site))
    return [*_beyond_gpus(resolved, limits, site), *_beyond_partition(resolved, limits)]


def _unknown_partition(resolved: ResolvedJob, site: Site) -> Iterator[ToolkitError]:
    if is_elsewhere(resolved.job.cluster, site):
        return
    named = resolved.job.partition.split(",")  # Slurm takes the first that serves
    name = next((one for one in named if one and one not in site.partitions), "")
    if name and site.partitions and site.scheduler.kind != "local":
        close = nearest(name, site.partitions) or list(site.partitions)
        yield refuse(
            resolved,
            "job.partition",
            f"site {site.name} has no partition {name!r}",
            f"write {' or '.join(repr(one) for one in close)}",
        )


def check_words(resolved: ResolvedJob) -> None:
    """Check that ranks can be started with what the job gives them, and that its own path can be written down.

    Raises:
        ToolkitError: an argument or a variable is too long, or bytes are no UTF-8.
    """
    if said := no_text(str(resolved.job_file)):
        raise ToolkitError(said, where=str(resolved.job_file), fix="rename the folder or the file")
    for number, word in enumerate(resolved.argv, start=1):
        if said := no_word(word):
            raise ToolkitError(said, where=f"word {number} behind --", fix="write it into a file that the job reads")
    entry = resolved.job.entry
    words = [*entry, *resolved.argv] if isinstance(entry, list) else []
    variables = {**resolved.site_env.vars, **resolved.network.vars, **resolved.env.vars}
    if said := no_start(words, variables):
        key = "env.vars" if no_start([], variables) else "job.entry"
        raise refuse(resolved, key, said, "write it into a file, and give the file's path")


def _check_without_scheduler(resolved: ResolvedJob) -> None:
    """What this machine by itself cannot give."""
    job, site = resolved.job, f"site {resolved.site.name}"
    for key, is_asked, said, fix in (
        ("nodes", job.min_nodes > 1, f"the job needs {job.min_nodes} nodes and {site} is this one machine", "-N 1"),
        ("array", job.array, f"{site} has no scheduler that could run the tasks of an array", 'array = ""'),
        ("repeat", job.repeat > 1, f"{site} has no scheduler that could start one job after the other", "repeat = 1"),
        ("cluster", job.cluster, f"{site} has no scheduler that knows a cluster {job.cluster!r}", 'cluster = ""'),
    ):
        if is_asked:
            raise refuse(resolved, f"job.{key}", said, f"--site with the name of a cluster, or {fix}")


def _check_nodelist(resolved: ResolvedJob) -> None:
    """sbatch reports a node that is both requested and excluded as an invalid name."""
    wanted, unwanted = resolved.job.nodelist, resolved.job.exclude
    if not wanted or not unwanted or "/" in wanted + unwanted:  # a file of names is sbatch's to read
        return
    try:
        both = sorted(set(expand_hostlist(wanted)) & set(expand_hostlist(unwanted)))
    except ToolkitError:  # sbatch knows more forms than toolkit, and validates them itself
        return
    if both:
        named = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
        raise refuse(
            resolved, "job.exclude", f"{named} must be in the allocation, says nodelist {wanted}, and must not",
            f"take {'it' if len(both) == 1 else 'them'} out of one of the two",
        )  # fmt: skip


def _check_container(resolved: ResolvedJob) -> None:
    runtime, image = resolved.site_container.runtime, resolved.container.image
    if image and not runtime:
        raise refuse(
            resolved,
            "container.image",
            f"the job has an image, and site {resolved.site.name} says nothing of containers",
            "write [container] runtime into the site file, or leave the image out",
        )
    if resolved.env.stage and (image or resolved.site_container.image):
        raise refuse(
            resolved, "env.stage", "ranks in a container run in the image's Python, so there is nothing to stage",
            "leave env.stage out, or the image",
        )  # fmt: skip
    if runtime == "pyxis" and resolved.launcher.kind in ("mpirun", "local"):
        raise refuse(
            resolved,
            "site_container.runtime",
            f"pyxis is a part of srun, and launcher.kind is {resolved.launcher.kind!r}",
            'launcher.kind = "srun"',
        )


def _check_repeat(resolved: ResolvedJob) -> None:
    """Repeated jobs are an array of which one task runs at a time; they replace requeues."""
    if resolved.job.repeat > 1 and resolved.job.array:
        raise refuse(
            resolved, "job.repeat", f"{resolved.job.repeat} repeated jobs are one run, but array {resolved.job.array} has tasks",
            "take one of repeat and array",
        )  # fmt: skip
    if resolved.job.repeat > 1 and resolved.job.requeue:
        raise refuse(
            resolved, "job.requeue", "a job that is requeued and one that follows it would be two starts at a time",
            "requeue = false, or repeat = 1",
        )  # fmt: skip


def _beyond_partition(resolved: ResolvedJob, limits: PartitionTable) -> Iterator[ToolkitError]:
    job = resolved.job
    on = f"partition {job.partition} of {resolved.site.name}"
    if limits.max_nodes and job.min_nodes > limits.max_nodes:
        yield refuse(
            resolved,
            "job.nodes",
            f"{job.min_nodes} nodes, but {on} gives at most {limits.max_nodes}",
            f"nodes = {limits.max_nodes}",
        )
    if limits.max_time_s is not None and job.time and (job.time_s is None or job.time_s > limits.max_time_s):
        yield refuse(
            resolved,
            "job.time",
            f"{job.time} is {format_slurm_time(job.time_s)}, but {on} gives at most {format_slurm_time(limits.max_time_s)}",
            f'time = "{limits.max_time}"',
        )
    cpus = job.ranks_per_node * job.cpus_per_rank
    if limits.cpus_per_node and cpus > limits.cpus_per_node:
        fits = limits.cpus_per_node // job.ranks_per_node
        key, fix = (
            ("job.cpus_per_rank", f"cpus_per_rank = {fits}")
            if fits
            else ("job.ranks_per_node", f"ranks_per_node = {limits.cpus_per_node}")
        )
        yield refuse(
            resolved,
            key,
            f"{counted(job.ranks_per_node, 'rank')} x {counted(job.cpus_per_rank, 'CPU')} = {cpus} CPUs per node, but {on} has {limits.cpus_per_node}",
            fix,
        )
    if limits.mem_gb_per_node and job.mem_gb_per_node > limits.mem_gb_per_node:
        yield refuse(
            resolved,
            "job.mem_gb_per_node",
            f"{job.mem_gb_per_node} GiB per node, but {on} has {limits.mem_gb_per_node}",
            f"mem_gb_per_node = {limits.mem_gb_per_node}",
        )
    if limits.account_required and not job.account:
        yield refuse(
            resolved,
            "job.account",
            f"{on} wants an account",
            'write account = "..." in [job], or -A ACCOUNT, or export SBATCH_ACCOUNT',
        )


def _beyond_gpus(resolved: ResolvedJob, limits: PartitionTable, site: Site) -> Iterator[ToolkitError]:
    """A site whose partitions name no GPUs at all says nothing of them; then Slurm has to judge."""
    job = resolved.job
    known = any(partition.gpus_per_node for partition in site.partitions.values())
    if known and job.gpus_per_node > limits.gpus_per_node:
        yield refuse(
            resolved,
            "job.gpus_per_node",
            f"{counted(job.gpus_per_node, 'GPU')} per node, but partition {job.partition} of {site.name} has {limits.gpus_per_node}",
            f"gpus_per_node = {limits.gpus_per_node}",
        )


def _check_warning(resolved: ResolvedJob) -> None:
    time_s, warn_s, whose = resolved.job.time_s, resolved.restart.warn_s, "job.time"
    limits = resolved.partition_limits
    if time_s is None and limits is not None and limits.max_time:
        time_s, whose = parse_slurm_time(limits.max_time), f"partition {resolved.job.partition}"
    if time_s is None or warn_s < time_s:
        return
    said, longer = f"leaves nothing of the {time_s} s of {whose}", "a longer time"
    if hours := meant_as_hours(resolved.job.time):  # a walltime of so few minutes was most likely to be one of hours
        said, longer = f"{said}: Slurm reads {resolved.job.time} as minutes", f'time = "{hours}" where hours are meant'
    raise refuse(
        resolved,
        "restart.warn_s",
        f"a warning {warn_s} s before walltime {said}",
        f"{longer}; else warn_s = {max(1, time_s // 4)}",
    )
