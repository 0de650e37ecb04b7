"""Check a job against its site, and reject requests that Slurm would reject or leave pending forever."""

import re
from collections.abc import Iterator

from toolkit.config.document import no_start, no_text, no_word
from toolkit.config.layout_checks import check_components, check_layout
from toolkit.config.needs import check_needs, default_of
from toolkit.config.refusal import refuse
from toolkit.config.resolved import ResolvedJob, is_elsewhere
from toolkit.config.site import PartitionTable, Site
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError, all_of, counted
from toolkit.metrics.alert_rules import SERIES, channels_of, parse_condition
from toolkit.metrics.windows import declared_metrics
from toolkit.rundir.arguments import NEWEST, continued, expanded
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.times import format_slurm_time, meant_as_hours, parse_slurm_time

__all__ = ["beyond_limits"]


def check_request(
    resolved: ResolvedJob, site: Site, *, limits: bool = True, anew: frozenset[str] | None = None
) -> None:
    """Check the job against its partition, and its keys against each other.

    `limits` is False if the caller checks the partition limits by a query to the cluster instead. `anew` contains the
    keys that override those of a job that was checked before.

    Raises:
        ToolkitError: the request is impossible; the message states both numbers, and the fix a value that works.
    """
    check_components(resolved)
    if site.scheduler.kind == "local":
        _check_without_scheduler(resolved)
    else:
        for one in resolved.components:
            _check_nodelist(one)
        if limits and (beyond := beyond_limits(resolved, site)):
            raise all_of(beyond)
    _check_ranks(resolved)
    _check_function(resolved)
    _check_restart_argv(resolved)
    _check_repeat(resolved)
    for one in resolved.components:
        _check_warning(one)
    _check_container(resolved)
    check_needs(resolved, anew)
    try:
        check_layout(resolved)
    except ToolkitError:
        for one in resolved.components:
            for unknown in _unknown_partition(one, site):  # report this instead: ranks may be derived from its GPUs
                raise unknown from None
        raise


def beyond_limits(resolved: ResolvedJob, site: Site) -> list[ToolkitError]:
    """Return an error for every value of a component that exceeds the limits of its partition in the site file."""
    errors = [error for one in resolved.components for error in _beyond_limits(one, site)]
    return list({str(error): error for error in errors}.values())  # values of [job] repeat in each component


def _beyond_limits(resolved: ResolvedJob, site: Site) -> list[ToolkitError]:
    limits = resolved.partition_limits
    if limits is None or site.scheduler.kind == "local":
        return list(_unknown_partition(resolved, site))
    return [*_beyond_gpus(resolved, limits, site), *_beyond_partition(resolved, limits)]


def _unknown_partition(resolved: ResolvedJob, site: Site) -> Iterator[ToolkitError]:
    if is_elsewhere(resolved.job.cluster, site):
        return
    named = resolved.job.partition.split(",")  # Slurm uses the first partition in the list that can run the job
    name = next((one for one in named if one and one not in site.partitions), "")
    if name and site.partitions and site.scheduler.kind != "local":
        close = nearest(name, site.partitions) or list(site.partitions)
        yield refuse(
            resolved,
            "job.partition",
            f"partition {name!r} not found at site {site.name}",
            f"write {' or '.join(repr(one) for one in close)}",
        )


def check_alerts(resolved: ResolvedJob) -> None:
    """Check that the channels and metrics of rules exist; ToolkitError names those that do not."""
    if not resolved.alerts.rules:
        return
    known = channels_of(dict(resolved.notify))
    series = [*SERIES, *declared_metrics({"observe": dict(resolved.observe)})]
    errors = []
    for name, rule in resolved.alerts.rules.items():
        condition = parse_condition(rule.when)
        if condition.severity is None and (metric := condition.subject) not in series:
            base, _, statistic = metric.rpartition(".")
            fix = f"use {base or metric}, with .mean, .min, .max or .p95"
            if base not in series and not re.fullmatch(r"p\d+", statistic):
                fix = (
                    f"use {' or '.join(nearest(metric, series) or [', '.join(series)])}; for a metric of toolkit.record, "
                    f'add "{metric}" or "{metric}:mean" to observe.metrics'
                )
            errors.append(refuse(resolved, f"alerts.rules.{name}.when", f"metric {metric!r} not found", fix))
        for channel in {*rule.channels} - known.keys():
            own = f"set notify.{channel}" if channel in ("mail", "webhook") else f"add {channel} to [notify.channels]"
            fix = f"use {' or '.join(nearest(channel, known) or known)}, or {own}"
            errors.append(refuse(resolved, f"alerts.rules.{name}.channels", f"channel {channel!r} not found", fix))
    if errors:
        raise all_of(errors)


def check_arguments(resolved: ResolvedJob) -> None:
    """Check that the system can start ranks with the job's arguments and variables, and that the job path is UTF-8.

    Raises:
        ToolkitError: an argument or a variable is too long, or is not UTF-8.
    """
    if problem := no_text(str(resolved.job_file)):
        raise ToolkitError(problem, where=str(resolved.job_file), fix="rename the folder or the file")
    for number, argument in enumerate(resolved.argv, start=1):
        if problem := no_word(argument):
            raise ToolkitError(problem, where=f"argument {number} after --", fix="pass the argument in a file")
    for argument in resolved.job.argv:
        if problem := no_word(argument):
            raise refuse(resolved, "job.argv", problem, "pass the argument in a file")
    entry = resolved.job.entry
    arguments = [*entry, *resolved.arguments] if isinstance(entry, list) else []
    variables = {**resolved.site_env.vars, **resolved.network.vars, **resolved.env.vars}
    if problem := no_start(arguments, variables):
        key = "env.vars" if no_start([], variables) else "job.entry"
        raise refuse(resolved, key, problem, "write the value to a file, and pass the path of the file")


def _check_without_scheduler(resolved: ResolvedJob) -> None:
    """Reject requests that a machine without a scheduler cannot serve."""
    job, site = resolved.job, f"site {resolved.site.name!r}"
    for key, is_asked, message, fix in (
        ("nodes", job.min_nodes > 1, f"the job needs {job.min_nodes} nodes, but {site} is a single machine", "-N 1"),
        ("array", job.array, f"{site} has no scheduler to run the tasks of an array", 'array = ""'),
        ("repeat", job.repeat > 1, f"{site} has no scheduler to start repeated jobs", "repeat = 1"),
        ("cluster", job.cluster, f"{site} has no scheduler for a cluster {job.cluster!r}", 'cluster = ""'),
    ):
        if is_asked:
            raise refuse(resolved, f"job.{key}", message, f"use --site with the name of a cluster, or set {fix}")


def _check_ranks(resolved: ResolvedJob) -> None:
    """Check that the total number of ranks needs exactly the nodes of the job."""
    job = resolved.job
    if not job.ranks:
        return
    if job.min_nodes != job.max_nodes or resolved.component:
        raise refuse(
            resolved, "job.ranks", "ranks requires a fixed number of nodes and no [[component]]", "remove ranks"
        )
    fewest, most = job.min_nodes, job.min_nodes * job.ranks_per_node
    if not fewest <= job.ranks <= most:
        each = -(-job.ranks // job.min_nodes)
        raise refuse(
            resolved, "job.ranks",
            f"{counted(job.min_nodes, 'node')} x {job.ranks_per_node} have {fewest} to {most} ranks, got {job.ranks}",
            f"set ranks_per_node = {each}, or nodes = {-(-job.ranks // job.ranks_per_node)}",
        )  # fmt: skip


def _check_function(resolved: ResolvedJob) -> None:
    """Reject keys of [restart] that have no effect on the kind of the entry."""
    is_function = isinstance(resolved.job.entry, str) and ":" in resolved.job.entry
    if is_function and resolved.restart.blind_requeues != default_of(type(resolved.restart), "blind_requeues"):
        what = "has no effect for a function, which reports its steps"
        raise refuse(resolved, "restart.blind_requeues", what, "remove blind_requeues")
    if is_function and resolved.restart.argv:
        what = "has no effect for a function, which receives no arguments"
        raise refuse(resolved, "restart.argv", what, "remove argv; a function calls toolkit.is_restart()")
    if is_function and resolved.observe.step_line:
        what = "has no effect for a function, which reports its steps"
        raise refuse(resolved, "observe.step_line", what, "remove step_line; `toolkit.record` adds metrics")
    key = "restart.steps_must_succeed"  # the user's own default applies to jobs of any kind
    if resolved.restart.steps_must_succeed and not resolved.job.once and resolved.origin(key).layer != "user":
        what = "has no effect without job.once: a rank that fails always fails the run"
        raise refuse(resolved, key, what, "remove steps_must_succeed")


def _check_restart_argv(resolved: ResolvedJob) -> None:
    """Check that `{newest}` in `restart.argv` is a path of this run, and that each option replaces one at most."""
    more, key = list(resolved.restart.argv), "restart.argv"
    named = [name for word in more for name in re.findall(r"\{[A-Za-z_]\w*\}", word)]
    if unknown := [name for name in named if name != NEWEST]:
        raise refuse(resolved, key, f"expected no name in braces but {NEWEST}, got {unknown[0]}", f"write {NEWEST}")
    if named and not resolved.restart.progress:
        what = f"{NEWEST} has no path without restart.progress, whose newest match it is"
        raise refuse(resolved, key, what, 'set progress to a pattern such as "out/step-*.pt"')
    if named and resolved.job.array:
        what = f"{NEWEST} may be a file of another task: in an array or a sweep it is the newest of all tasks"
        fix = 'write an argument with which each task loads its own file, such as "--resume=true", or submit each task as a run'
        raise refuse(resolved, key, what, fix)
    entry = resolved.job.entry
    of_entry = entry[1:] if isinstance(entry, list) else []
    continued([*of_entry, *resolved.arguments], expanded(more, ""), where=resolved.origin(key).place(key))


def _check_nodelist(resolved: ResolvedJob) -> None:
    """Check that no node is both required and excluded; the error of sbatch would only call the node name invalid."""
    wanted, unwanted = resolved.job.nodelist, resolved.job.exclude
    if not wanted or not unwanted or "/" in wanted + unwanted:  # a node file, which only sbatch reads
        return
    try:
        both = sorted(set(expand_hostlist(wanted)) & set(expand_hostlist(unwanted)))
    except ToolkitError:  # sbatch accepts more forms than toolkit, and rejects invalid ones
        return
    if both:
        named = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
        raise refuse(
            resolved, "job.exclude", f"{named} cannot be both in nodelist {wanted} and in exclude",
            f"remove {'it' if len(both) == 1 else 'them'} from one of the two",
        )  # fmt: skip


def _check_container(resolved: ResolvedJob) -> None:
    runtime, image = resolved.site_container.runtime, resolved.container.image
    if image and not runtime:
        raise refuse(
            resolved,
            "container.image",
            f"the job has an image, but site {resolved.site.name} has no container runtime",
            "set [container] runtime in the site file, or remove the image",
        )
    if resolved.env.stage and (image or resolved.site_container.image):
        raise refuse(
            resolved, "env.stage", "ranks in a container run the image's Python, so env.stage has no effect",
            "remove env.stage, or the image",
        )  # fmt: skip
    if runtime == "pyxis" and resolved.launcher.kind in ("mpirun", "local"):
        raise refuse(
            resolved,
            "site_container.runtime",
            f"pyxis is a plugin of srun, but launcher.kind is {resolved.launcher.kind!r}",
            'set launcher.kind = "srun"',
        )


def _check_repeat(resolved: ResolvedJob) -> None:
    """Check that `repeat` is used alone: repeated jobs are submitted as a Slurm array, and they replace a requeue."""
    if resolved.job.repeat > 1 and resolved.job.array:
        raise refuse(
            resolved, "job.repeat", f"repeat = {resolved.job.repeat} cannot be combined with array = {resolved.job.array!r}: repeated jobs belong to one run, array tasks to several",
            "use only one of repeat and array",
        )  # fmt: skip
    if resolved.job.repeat > 1 and resolved.job.requeue:
        raise refuse(
            resolved, "job.requeue", "requeue cannot be combined with repeat: the requeued job and the next repeated job would run at the same time",
            "set requeue = false, or repeat = 1",
        )  # fmt: skip


def _beyond_partition(resolved: ResolvedJob, limits: PartitionTable) -> Iterator[ToolkitError]:
    job = resolved.job
    on = f"partition {job.partition} of {resolved.site.name}"
    if limits.max_nodes and job.min_nodes > limits.max_nodes:
        yield refuse(
            resolved,
            "job.nodes",
            f"{job.min_nodes} nodes, but {on} allows at most {limits.max_nodes}",
            f"set nodes = {limits.max_nodes}",
        )
    if limits.max_time_s is not None and job.time and (job.time_s is None or job.time_s > limits.max_time_s):
        yield refuse(
            resolved,
            "job.time",
            f"{job.time} is {format_slurm_time(job.time_s)}, but {on} allows at most {format_slurm_time(limits.max_time_s)}",
            f'set time = "{limits.max_time}"',
        )
    cpus = job.ranks_per_node * job.cpus_per_rank
    if limits.cpus_per_node and cpus > limits.cpus_per_node:
        fits = limits.cpus_per_node // job.ranks_per_node
        key, fix = (
            ("job.cpus_per_rank", f"set cpus_per_rank = {fits}")
            if fits
            else ("job.ranks_per_node", f"set ranks_per_node = {limits.cpus_per_node}")
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
            f"set mem_gb_per_node = {limits.mem_gb_per_node}",
        )
    if limits.account_required and not job.account:
        yield refuse(
            resolved,
            "job.account",
            f"{on} requires an account",
            'set account = "..." in [job], use -A ACCOUNT, or export SBATCH_ACCOUNT',
        )


def _beyond_gpus(resolved: ResolvedJob, limits: PartitionTable, site: Site) -> Iterator[ToolkitError]:
    """Yield an error if the job requests too many GPUs; if no partition states its GPUs, Slurm checks the request."""
    job = resolved.job
    states_gpus = any(partition.gpus_per_node for partition in site.partitions.values())
    if states_gpus and job.gpus_per_node > limits.gpus_per_node:
        yield refuse(
            resolved,
            "job.gpus_per_node",
            f"{counted(job.gpus_per_node, 'GPU')} per node, but partition {job.partition} of {site.name} has {limits.gpus_per_node}",
            f"set gpus_per_node = {limits.gpus_per_node}",
        )


def _check_warning(resolved: ResolvedJob) -> None:
    time_s, warn_s, whose = resolved.job.time_s, resolved.restart.warn_s, "job.time"
    limits = resolved.partition_limits
    if time_s is None and limits is not None and limits.max_time:
        time_s, whose = parse_slurm_time(limits.max_time), f"partition {resolved.job.partition}"
    if time_s is None or warn_s < time_s or not resolved.has_warning:
        return
    problem, longer = f"would be at or before the start of the job: {whose} is {time_s} s", "set a longer time"
    if hours := meant_as_hours(resolved.job.time):  # "24" means minutes; the user probably meant hours
        problem, longer = (
            f"{problem}, since Slurm reads {resolved.job.time} as minutes",
            f'set time = "{hours}" if you mean hours',
        )
    raise refuse(
        resolved,
        "restart.warn_s",
        f"a warning {warn_s} s before the walltime {problem}",
        f"{longer}, or warn_s = {max(1, time_s // 4)}",
    )
