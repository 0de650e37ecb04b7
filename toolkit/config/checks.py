"""Can the site serve this job? Requests that Slurm would refuse, or leave pending for ever, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.pipeline import SEVERAL_STAGES, micro_batch_fix, no_micro_batches
from toolkit.config.resolved import ResolvedJob
from toolkit.config.site import PartitionTable, Site
from toolkit.config.values import no_start, no_text, no_word
from toolkit.errors import ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.times import format_slurm_time, parse_slurm_time


def counted(number: int, what: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_request(resolved: ResolvedJob, site: Site) -> None:
    """Check the job against its partition and against itself.

    Raises:
        ToolkitError: the request is impossible; the message has both numbers and the fix one that works.
    """
    if site.scheduler.kind == "local":
        _check_one_node(resolved)
        _check_no_array(resolved)
    else:
        _check_nodelist(resolved)
        if resolved.partition_limits is not None:
            _check_gpus(resolved, resolved.partition_limits, site)
            _check_partition(resolved, resolved.partition_limits)
    _check_warning(resolved)
    _check_container(resolved)
    _check_mesh(resolved)
    _check_zero(resolved)
    _check_without_effect(resolved)
    _check_pipeline(resolved)
    if not {"train.batch", "train.micro_batch"}.isdisjoint(resolved.origins):  # else the script may use neither
        _check_batch(resolved)
        _check_micro_batches(resolved)


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
        raise _refuse(resolved, key, said, "write it into a file, and give the file's path")


def _refuse(resolved: ResolvedJob, key: str, message: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=resolved.origin(key).place(key), fix=fix)


def _check_one_node(resolved: ResolvedJob) -> None:
    if resolved.job.min_nodes > 1:
        raise _refuse(
            resolved,
            "job.nodes",
            f"the job needs {resolved.job.min_nodes} nodes and site {resolved.site.name} is this one machine",
            "-N 1, or --site with the name of a cluster",
        )


def _check_nodelist(resolved: ResolvedJob) -> None:
    """sbatch says of a node that is wanted and left out that its name is invalid."""
    wanted, unwanted = resolved.job.nodelist, resolved.job.exclude
    if not wanted or not unwanted or "/" in wanted + unwanted:  # a file of names is sbatch's to read
        return
    try:
        both = sorted(set(expand_hostlist(wanted)) & set(expand_hostlist(unwanted)))
    except ToolkitError:  # sbatch knows more forms than we do, and judges those that nobody knows
        return
    if both:
        named = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
        raise _refuse(
            resolved, "job.exclude", f"{named} must be in the allocation, says nodelist {wanted}, and must not",
            f"take {'it' if len(both) == 1 else 'them'} out of one of the two",
        )  # fmt: skip


def _check_container(resolved: ResolvedJob) -> None:
    runtime, image = resolved.site_container.runtime, resolved.container.image
    if image and not runtime:
        raise _refuse(
            resolved,
            "container.image",
            f"the job has an image, and site {resolved.site.name} says nothing of containers",
            "write [container] runtime into the site file, or leave the image out",
        )
    if resolved.env.stage and (image or resolved.site_container.image):
        raise _refuse(
            resolved, "env.stage", "ranks in a container run in the image's Python, so there is nothing to stage",
            "leave env.stage out, or the image",
        )  # fmt: skip
    if runtime == "pyxis" and resolved.launcher.kind in ("mpirun", "local"):
        raise _refuse(
            resolved,
            "site_container.runtime",
            f"pyxis is a part of srun, and launcher.kind is {resolved.launcher.kind!r}",
            'launcher.kind = "srun"',
        )


def _check_no_array(resolved: ResolvedJob) -> None:
    if resolved.job.array:
        raise _refuse(
            resolved,
            "job.array",
            f"site {resolved.site.name} has no scheduler that could run the tasks of an array",
            '--site with the name of a cluster, or array = ""',
        )


def _check_partition(resolved: ResolvedJob, limits: PartitionTable) -> None:
    job = resolved.job
    on = f"partition {job.partition} of {resolved.site.name}"
    if limits.max_nodes and job.min_nodes > limits.max_nodes:
        raise _refuse(
            resolved,
            "job.nodes",
            f"{job.min_nodes} nodes, but {on} gives at most {limits.max_nodes}",
            f"nodes = {limits.max_nodes}",
        )
    if limits.max_time_s is not None and job.time and (job.time_s is None or job.time_s > limits.max_time_s):
        raise _refuse(
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
        raise _refuse(
            resolved,
            key,
            f"{counted(job.ranks_per_node, 'rank')} x {counted(job.cpus_per_rank, 'CPU')} = {cpus} CPUs per node, but {on} has {limits.cpus_per_node}",
            fix,
        )
    if limits.mem_gb_per_node and job.mem_gb_per_node > limits.mem_gb_per_node:
        raise _refuse(
            resolved,
            "job.mem_gb_per_node",
            f"{job.mem_gb_per_node} GiB per node, but {on} has {limits.mem_gb_per_node}",
            f"mem_gb_per_node = {limits.mem_gb_per_node}",
        )
    if limits.account_required and not job.account:
        raise _refuse(
            resolved,
            "job.account",
            f"{on} wants an account",
            'write account = "..." in [job], or -A ACCOUNT, or export SBATCH_ACCOUNT',
        )


def _check_gpus(resolved: ResolvedJob, limits: PartitionTable, site: Site) -> None:
    """A site whose partitions name no GPUs at all says nothing of them; then Slurm has to judge."""
    job = resolved.job
    known = any(partition.gpus_per_node for partition in site.partitions.values())
    if known and job.gpus_per_node > limits.gpus_per_node:
        raise _refuse(
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
    if time_s is not None and warn_s >= time_s:
        raise _refuse(
            resolved,
            "restart.warn_s",
            f"a warning {warn_s} s before walltime leaves nothing of the {time_s} s of {whose}",
            f"warn_s = {max(1, time_s // 4)}, or a longer time",
        )


def _rank_counts(resolved: ResolvedJob) -> range:
    job = resolved.job
    return range(job.min_nodes * job.ranks_per_node, job.max_nodes * job.ranks_per_node + 1, job.ranks_per_node)


def _ranks_said(resolved: ResolvedJob) -> str:
    job = resolved.job
    if job.min_nodes != job.max_nodes:
        return f"any number of ranks ({job.nodes} nodes x {job.ranks_per_node})"
    return f"{counted(job.min_nodes * job.ranks_per_node, 'rank')} ({counted(job.min_nodes, 'node')} x {job.ranks_per_node})"


def _check_mesh(resolved: ResolvedJob) -> None:
    """Where the nodes are a range, one number of nodes that fits is enough."""
    mesh = resolved.parallel
    product, wanted = mesh.model_ranks, "pp x shard x cp x tp"
    numbers = f"{mesh.pp} x {mesh.shard} x {mesh.cp} x {mesh.tp}"
    if mesh.replicate:
        product, wanted, numbers = (product * mesh.replicate, f"replicate x {wanted}", f"{mesh.replicate} x {numbers}")
    fits = (lambda ranks: ranks == product) if mesh.replicate else (lambda ranks: ranks % product == 0)
    if not any(fits(ranks) for ranks in _rank_counts(resolved)):
        key = next(
            (
                f"parallel.{name}"
                for name in ("shard", "tp", "pp", "cp", "replicate")
                if f"parallel.{name}" in resolved.origins
            ),
            "parallel",
        )
        verb = "is not" if mesh.replicate else "does not divide"
        raise _refuse(
            resolved,
            key,
            f"{wanted} = {numbers} = {product} {verb} {_ranks_said(resolved)}",
            f"ask for {'' if mesh.replicate else 'a multiple of '}{counted(product, 'rank')}, or change [parallel]",
        )
    if (mesh.shard * mesh.cp) % mesh.ep:
        raise _refuse(
            resolved,
            "parallel.ep",
            f"ep = {mesh.ep} does not divide shard x cp = {mesh.shard} x {mesh.cp} = {mesh.shard * mesh.cp}",
            f"ep = {mesh.shard * mesh.cp}",
        )


def _check_zero(resolved: ResolvedJob) -> None:
    """What is sharded must be sharded over ranks, and the other way round."""
    zero, shard = resolved.parallel.zero, resolved.parallel.shard
    if zero and shard == 1:
        ranks = max(_rank_counts(resolved))
        over = f"shard = {ranks}, or " if ranks > 1 else ""
        raise _refuse(
            resolved, "parallel.zero", f"zero = {zero} shards over shard = 1 rank, which is nothing", f"{over}zero = 0"
        )
    if shard > 1 and not zero:
        raise _refuse(
            resolved,
            "parallel.zero",
            f"zero = 0 shards nothing over shard = {shard} ranks",
            f"zero = 1, 2 or 3, or shard = 1 and replicate = {shard}",
        )


def _check_batch(resolved: ResolvedJob) -> None:
    """The batch is split over the ranks that see different data: all but those of pp, cp and tp."""
    mesh, train = resolved.parallel, resolved.train
    same_data = mesh.pp * mesh.cp * mesh.tp
    splits = [ranks // same_data for ranks in _rank_counts(resolved) if ranks % same_data == 0]
    if not any(train.batch % split == 0 for split in splits):
        split = splits[0]
        whole = split * max(1, train.micro_batch)  # else the batch that is named here would be the next to be refused
        raise _refuse(
            resolved,
            "train.batch",
            f"{counted(train.batch, 'sample')} cannot be split evenly over {counted(split, 'data rank')}",
            f"batch = {' or '.join(str(one) for one in _multiples_around(train.batch, whole))}",
        )
    shares = [train.batch // split for split in splits if train.batch % split == 0]
    if train.micro_batch and not any(share % train.micro_batch == 0 for share in shares):
        raise _refuse(
            resolved,
            "train.micro_batch",
            f"{train.micro_batch} does not divide the {counted(shares[0], 'sample')} of one rank (batch {train.batch})",
            f"micro_batch = {max(size for size in range(1, min(train.micro_batch, shares[0]) + 1) if shares[0] % size == 0)}",
        )


def _check_without_effect(resolved: ResolvedJob) -> None:
    """Keys that would be taken and do nothing."""
    mesh, train = resolved.parallel, resolved.train
    if mesh.sequence and mesh.tp == 1:
        raise _refuse(
            resolved,
            "parallel.sequence",
            "the sequence is shared by tensor parallel ranks, and tp = 1 has none",
            "tp = 2 or more, or sequence = false",
        )
    if mesh.model_ranks > 1 and mesh.bucket_mb == "measured":
        raise _refuse(
            resolved,
            "parallel.bucket_mb",
            f"buckets are those of whole copies, and here {counted(mesh.model_ranks, 'rank')} share a model",
            "leave bucket_mb out",
        )
    if mesh.model_ranks > 1 and mesh.reduction == "measured":
        raise _refuse(
            resolved,
            "parallel.reduction",
            f"measuring chooses among all-reduces of whole copies, and here {counted(mesh.model_ranks, 'rank')} share a model",
            'reduction = "auto"',
        )
    if train.profile_steps and train.profile_from > train.steps:
        raise _refuse(
            resolved,
            "train.profile_from",
            f"profiling begins at step {train.profile_from}, and the run ends with step {train.steps}",
            f"profile_from = {max(1, train.steps - train.profile_steps + 1)}",
        )


def _check_pipeline(resolved: ResolvedJob) -> None:
    mesh = resolved.parallel
    if mesh.stages_per_rank > 1 and mesh.pp == 1:
        raise _refuse(
            resolved,
            "parallel.stages_per_rank",
            f"{mesh.stages_per_rank} pipeline stages a rank, and pp = 1 is no pipeline",
            "pp = 2 or more, or stages_per_rank = 1",
        )
    if mesh.stages_per_rank > 1 and mesh.schedule not in SEVERAL_STAGES:
        raise _refuse(
            resolved,
            "parallel.stages_per_rank",
            f'{mesh.stages_per_rank} stages a rank, and schedule "{mesh.schedule}" has one',
            'schedule = "interleaved", or stages_per_rank = 1',
        )
    if mesh.pp > 1 and mesh.shard > 1 and mesh.zero == 3 and mesh.schedule == "zero_bubble":
        raise _refuse(
            resolved,
            "parallel.schedule",
            f'schedule "zero_bubble" leaves weights\' gradients for later, when zero = 3 has given the weights of '
            f"{mesh.shard} shards away",
            'zero = 1, or schedule = "interleaved"',
        )


def _check_micro_batches(resolved: ResolvedJob) -> None:
    """A pipeline needs several micro-batches a step; where the nodes are a range, one number of nodes that fits."""
    mesh, train = resolved.parallel, resolved.train
    if mesh.pp == 1:
        return
    same_data = mesh.pp * mesh.cp * mesh.tp
    splits = [ranks // same_data for ranks in _rank_counts(resolved) if ranks % same_data == 0]
    shares = [(train.batch // split, split) for split in splits if train.batch % split == 0]
    said = [no_micro_batches(mesh, share // (train.micro_batch or share)) for share, _ in shares]
    if all(said):
        share, split = shares[0]
        raise _refuse(
            resolved,
            "train.micro_batch",
            f"{said[0]} ({counted(share, 'sample')} of {counted(split, 'data rank')}"
            + (f", {train.micro_batch} at once)" if train.micro_batch else ", all at once)"),
            micro_batch_fix(mesh, share, train.micro_batch, split),
        )


def _multiples_around(number: int, step: int) -> Iterator[int]:
    below = number // step * step
    if below:
        yield below
    yield below + step
