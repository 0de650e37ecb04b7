"""Check before submission that the numbers in [parallel] and [train] fit the number of ranks."""

from collections.abc import Iterator

from toolkit.config.adapters import check_adapters
from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.gradient_compression import check_gradient_compression
from toolkit.config.local_sgd import check_local_sgd
from toolkit.config.offload_checks import check_offload
from toolkit.config.refusal import refuse
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import SEVERAL_STAGES, ParallelTable, TrainTable, micro_batch_fix, no_micro_batches
from toolkit.errors import ToolkitError, counted

__all__ = ["SHAPE", "check_combinations", "check_passes", "check_roll_back", "refuse_components"]


def check_layout(resolved: ResolvedJob) -> None:
    """Check that the model and the batch can be distributed over the ranks.

    Raises:
        ToolkitError: the message states both numbers, and the fix a number that works.
    """
    is_auto = resolved.train.is_auto
    if is_auto:
        _check_auto(resolved)
        resolved = resolved.model_copy(update={"train": resolved.train.model_copy(update={"micro_batch": 1})})
    _check_mesh(resolved)
    _check_zero(resolved)
    _check_reduction(resolved)
    _check_profile(resolved)
    _check_pipeline(resolved)
    _check_combinations(resolved, is_auto=is_auto)
    try:
        check_gradient_compression(resolved)
        check_local_sgd(resolved)
    except ToolkitError as error:
        raise resolved.placed(error) from None
    if resolved.adapters.model_fields_set:
        check_adapters(resolved)
    if not {"train.batch", "train.micro_batch"}.isdisjoint(resolved.origins):  # the script may ignore defaults
        _check_batch(resolved)
        _check_micro_batches(resolved)


def _ranks_in_words(resolved: ResolvedJob) -> str:
    job = resolved.job
    if len(resolved.components) > 1:
        parts = " + ".join(f"{one.job.min_nodes} x {one.job.ranks_per_node}" for one in resolved.components)
        return f"{counted(max(resolved.rank_counts), 'rank')} ({parts})"
    if job.min_nodes != job.max_nodes:
        return f"any number of ranks ({job.nodes} nodes x {job.ranks_per_node})"
    return f"{counted(job.min_nodes * job.ranks_per_node, 'rank')} ({counted(job.min_nodes, 'node')} x {job.ranks_per_node})"


def _check_auto(resolved: ResolvedJob) -> None:
    """Reject "auto" for jobs whose tasks or numbers of nodes would need sizes of their own."""
    job = resolved.job
    what = "an array" if job.array else f"nodes = {job.nodes}" if job.min_nodes != job.max_nodes else ""
    if what or job.once:
        what = what or "a batch script"
        message = f'"auto" finds one size for one job, and cannot be combined with {what}'
        raise refuse(resolved, "train.micro_batch", message, "set the number that `toolkit bench batch` finds")


def _check_mesh(resolved: ResolvedJob) -> None:
    """Check the mesh. If `job.nodes` is a range, the mesh must fit at least one number of nodes in it."""
    mesh = resolved.parallel
    product, wanted = mesh.model_ranks, "pp x shard x cp x tp"
    numbers = f"{mesh.pp} x {mesh.shard} x {mesh.cp} x {mesh.tp}"
    if mesh.replicate:
        product, wanted, numbers = (product * mesh.replicate, f"replicate x {wanted}", f"{mesh.replicate} x {numbers}")
    fits = (lambda ranks: ranks == product) if mesh.replicate else (lambda ranks: ranks % product == 0)
    if not any(fits(ranks) for ranks in resolved.rank_counts):
        key = next(
            (
                f"parallel.{name}"
                for name in ("shard", "tp", "pp", "cp", "replicate")
                if f"parallel.{name}" in resolved.origins
            ),
            "parallel",
        )
        verb = "is not equal to" if mesh.replicate else "does not divide"
        fitting = [product] if mesh.replicate else list(_multiples_around(max(resolved.rank_counts), product))
        raise refuse(
            resolved,
            key,
            f"{wanted} = {numbers} = {product} {verb} {_ranks_in_words(resolved)}",
            f"request {' or '.join(map(str, fitting))} rank{'' if fitting == [1] else 's'}, or change [parallel]",
        )
    if (mesh.shard * mesh.cp) % mesh.ep:
        raise refuse(
            resolved,
            "parallel.ep",
            f"shard x cp = {mesh.shard} x {mesh.cp} = {mesh.shard * mesh.cp} is not divisible by ep = {mesh.ep}",
            f"set ep = {mesh.shard * mesh.cp}",
        )


def _check_zero(resolved: ResolvedJob) -> None:
    """Check that `zero` > 0 if and only if `shard` > 1."""
    zero, shard = resolved.parallel.zero, resolved.parallel.shard
    if zero and shard == 1:
        ranks = max(resolved.rank_counts)
        over = f"shard = {ranks}, or " if ranks > 1 else ""
        raise refuse(resolved, "parallel.zero", f"zero = {zero} has no effect with shard = 1", f"set {over}zero = 0")
    if shard > 1 and not zero:
        raise refuse(
            resolved,
            "parallel.zero",
            f"shard = {shard} has no effect with zero = 0",
            f"set zero = 1, 2 or 3, or set shard = 1 and replicate = {shard}",
        )


def _data_ranks(resolved: ResolvedJob) -> list[int]:
    """Return the data parallel size (ranks that read different samples) for each number of nodes that fits the mesh."""
    mesh = resolved.parallel
    same_data = mesh.pp * mesh.cp * mesh.tp
    return [ranks // same_data for ranks in resolved.rank_counts if ranks % same_data == 0]


def _shares(resolved: ResolvedJob) -> list[tuple[int, int]]:
    """Return (samples per data rank, number of data ranks) for each data parallel size that divides the batch."""
    batch = resolved.train.batch
    return [(batch // split, split) for split in _data_ranks(resolved) if batch % split == 0]


def _check_batch(resolved: ResolvedJob) -> None:
    """Check that the batch is divisible by the data ranks, and the samples of each data rank by `micro_batch`."""
    train, shares = resolved.train, _shares(resolved)
    if not shares:
        split = _data_ranks(resolved)[0]
        whole = split * max(1, train.micro_batch)  # the suggested batch must also be divisible by micro_batch
        raise refuse(
            resolved,
            "train.batch",
            f"a batch of {counted(train.batch, 'sample')} is not divisible by {counted(split, 'data rank')}",
            f"set batch = {' or '.join(str(one) for one in _multiples_around(train.batch, whole))}",
        )
    if train.micro_batch and not any(share % train.micro_batch == 0 for share, _ in shares):
        share = shares[0][0]
        raise refuse(
            resolved,
            "train.micro_batch",
            f"{counted(share, 'sample')} per data rank (batch {train.batch}) are not divisible by micro_batch = {train.micro_batch}",
            f"set micro_batch = {max(size for size in range(1, min(train.micro_batch, share) + 1) if share % size == 0)}",
        )


def _check_reduction(resolved: ResolvedJob) -> None:
    mesh = resolved.parallel
    nodes = sum(one.job.max_nodes for one in resolved.components)
    on_node = sorted({one.job.ranks_per_node for one in resolved.components})
    even = ", with equal numbers on each" if len(on_node) > 1 else ""
    if mesh.model_ranks > 1 and mesh.reduction == "measured":
        raise refuse(
            resolved,
            "parallel.reduction",
            f"'measured' requires a whole model on every rank, but {counted(mesh.model_ranks, 'rank')} share each model",
            'set reduction = "auto"',
        )
    if mesh.reduction == "hierarchical" and (nodes == 1 or on_node[0] == 1 or len(on_node) > 1):
        raise refuse(
            resolved,
            "parallel.reduction",
            f"a hierarchical reduction requires two or more nodes with two or more ranks each{even}, got "
            f"{counted(nodes, 'node')} with {' or '.join(counted(count, 'rank') for count in on_node)} each",
            'set reduction = "auto"',
        )


def _check_profile(resolved: ResolvedJob) -> None:
    train = resolved.train
    if train.profile_steps and train.profile_from > train.steps:
        raise refuse(
            resolved,
            "train.profile_from",
            f"profiling starts at step {train.profile_from}, but the last step of the run is {train.steps}",
            f"set profile_from = {max(1, train.steps - train.profile_steps + 1)}",
        )


def _check_pipeline(resolved: ResolvedJob) -> None:
    mesh = resolved.parallel
    if mesh.pp > 1 and mesh.stages_per_rank > 1 and mesh.schedule not in SEVERAL_STAGES:
        raise refuse(
            resolved,
            "parallel.stages_per_rank",
            f'{mesh.stages_per_rank} stages per rank, but schedule "{mesh.schedule}" supports only one',
            'set schedule = "interleaved", or stages_per_rank = 1',
        )
    if mesh.pp > 1 and mesh.shard > 1 and mesh.zero == 3 and mesh.schedule == "zero_bubble":
        raise refuse(
            resolved,
            "parallel.schedule",
            f'schedule "zero_bubble" cannot be combined with zero = 3: it delays weight gradients until after the weights that '
            f"are sharded over {mesh.shard} ranks have been released",
            'set zero = 1, or schedule = "interleaved"',
        )


def _check_combinations(resolved: ResolvedJob, *, is_auto: bool) -> None:
    try:
        check_combinations(resolved.train, resolved.parallel, min(resolved.rank_counts))
        if not is_auto:
            check_passes(resolved.train, resolved.parallel, min(resolved.rank_counts))
    except ToolkitError as error:
        raise resolved.placed(error) from None
    train = resolved.train
    at_once = train.micro_batch == 0 or train.micro_batch >= train.batch
    if train.lr_scaling == "adaptive" and at_once and max(resolved.rank_counts) == 1:
        raise refuse(
            resolved,
            "train.lr_scaling",
            "AdaScale requires two or more micro-batches per step, but one rank with one micro-batch has only one",
            f"use two or more ranks, or micro_batch = {max(1, train.batch // 2)} or less",
        )


def _check_micro_batches(resolved: ResolvedJob) -> None:
    """Check that a pipeline has enough micro-batches per step, for at least one number of nodes in a range."""
    mesh, train = resolved.parallel, resolved.train
    if mesh.pp == 1:
        return
    shares = _shares(resolved)
    problems = [no_micro_batches(mesh, share // (train.micro_batch or share)) for share, _ in shares]
    if all(problems):
        share, split = shares[0]
        raise refuse(
            resolved,
            "train.micro_batch",
            f"{problems[0]} ({counted(share, 'sample')} per data rank, {counted(split, 'data rank')}"
            + f", micro_batch = {train.micro_batch}{'' if train.micro_batch else ': all samples at once'})",
            micro_batch_fix(mesh, share, train.micro_batch, split),
        )


def _multiples_around(number: int, step: int) -> Iterator[int]:
    below = number // step * step
    if below:
        yield below
    yield below + step


_OVER_THE_FILE = ("SBATCH_*", "TOOLKIT_*", "flag")
SHAPE = ("nodes", "ranks_per_node")  # a flag cannot set these for all components at once


def check_components(resolved: ResolvedJob) -> None:
    """Check that Slurm can run a job with components, and that srun can start it as one job step.

    Raises:
        ToolkitError: a key cannot be combined with components; the error contains the fix.
    """
    if not resolved.component:
        return
    _check_flags(resolved)
    if resolved.scheduler.kind == "local":
        raise refuse(
            resolved, "component", f"site {resolved.site.name} has no scheduler that supports heterogeneous jobs",
            "use --site with the name of a cluster, or remove the components",
        )  # fmt: skip
    if resolved.launcher.kind not in ("auto", "srun"):
        raise refuse(
            resolved, "component", f"only srun can start ranks in several components, but the launcher of site "
            f"{resolved.site.name} is {resolved.launcher.kind}",
            'set launcher.kind = "srun" in the site file, or remove the components',
        )  # fmt: skip
    if resolved.job.array:
        raise refuse(resolved, "job.array", "Slurm does not support arrays of heterogeneous jobs", "remove it")
    if resolved.job.repeat > 1:
        raise refuse(
            resolved, "job.repeat", "repeated jobs are submitted as an array, but Slurm does not support arrays of heterogeneous jobs",
            "set repeat = 1",
        )  # fmt: skip
    _check_nodes(resolved)


def refuse_components(resolved: ResolvedJob, message: str, fix: str) -> None:
    """Reject a job with components, for a feature that requires the same number of ranks on every node.

    Raises:
        ToolkitError: the job has components.
    """
    if resolved.component:
        raise refuse(resolved, "component", message, fix)


def _check_flags(resolved: ResolvedJob) -> None:
    """Reject a flag for a key that components set, or that gives their shape: it changes only [job], so it has no effect."""
    for name in type(resolved.component[0]).model_fields:
        origin = resolved.origin(f"job.{name}")
        saying = [number for number, table in enumerate(resolved.component) if name in table.stated]
        if origin.layer in _OVER_THE_FILE and (saying or name in SHAPE):
            raise ToolkitError(
                f"cannot set {name} for the {len(resolved.component)} components of a heterogeneous job",
                where=origin.place(f"job.{name}"),
                fix=f"omit it, and set component[{saying[0] if saying else 0}].{name} in the job file",
            )


def _check_nodes(resolved: ResolvedJob) -> None:
    for number, one in enumerate(resolved.components):
        if one.job.min_nodes != one.job.max_nodes:
            raise refuse(
                resolved, "job.nodes", f"expected one number of nodes for component[{number}], got the range {one.job.nodes} of [job]",
                f"set nodes = {one.job.min_nodes}, or set nodes in each [[component]]",
            )  # fmt: skip
    if resolved.job.nodelist and sum("nodelist" not in table.stated for table in resolved.component) > 1:
        raise refuse(
            resolved, "job.nodelist", "a node can be in only one component, but several components inherit this nodelist",
            "set nodelist in the [[component]] instead",
        )  # fmt: skip


def check_combinations(train: TrainTable, parallel: ParallelTable, ranks: int | None = None) -> None:
    """Reject settings of [train] that the trainer does not support with this mesh and this number of ranks.

    Raises:
        ToolkitError: the message names both settings.
    """
    if train.recompute == "selective" and parallel.pp > 1 and parallel.schedule == "zero_bubble":
        raise ToolkitError(
            'recompute = "selective" releases its activations in a single backward pass, but zero_bubble splits the backward pass in two',
            where="train.recompute",
            fix='use "every", or schedule = "interleaved"',
        )
    if train.compile and (name := next((name for name in ("tp", "pp", "cp") if getattr(parallel, name) > 1), "")):
        raise ToolkitError(
            f"{name} = {getattr(parallel, name)} cannot be combined with torch.compile: its communication causes graph breaks",
            where="train.compile",
            fix=f"set train.compile = false, or {name} = 1",
        )
    if parallel.bucket_mb == "planned" and parallel.unused_parameters:
        raise ToolkitError(
            "with unused_parameters, DDP keeps its first buckets, which are not in the order of a plan",
            where="parallel.bucket_mb",
            fix='use "measured", or a size',
        )
    if train.optimizer == "adamw_8bit":
        _check_8_bits(train, parallel)
    if train.lr_scaling == "adaptive":
        _check_adaptive(train, parallel)
    if train.offloaded or train.offload_to or train.offload_activations_as != "as_is":
        check_offload(train, parallel, ranks)


def check_passes(train: TrainTable, parallel: ParallelTable, ranks: int) -> None:
    """Reject micro-batches of one sample if ranks that gather shards, or exchange tokens, would have different numbers of them.

    Raises:
        ToolkitError: the message states the numbers, and the fix a batch that works.
    """
    size = ranks // parallel.model_ranks * parallel.shard
    if train.micro_batch == 1 and train.batch % max(1, size) and (parallel.shard > 1 or parallel.ep > 1):
        raise ToolkitError(
            f"ranks that share a model require equal numbers of micro-batches, but {size} data ranks have {train.batch // size} or "
            f"{train.batch // size + 1} samples of a batch of {train.batch} in micro-batches of 1",
            where="train.batch",
            fix=f"set train.batch = {-(-train.batch // size) * size}",
        )


def _check_8_bits(train: TrainTable, parallel: ParallelTable) -> None:
    refused = [f"{name} = {size}" for name, size in (("shard", parallel.shard), ("tp", parallel.tp)) if size > 1]
    refused += ['offload = "optimizer"'] if "optimizer" in train.offloaded else []
    if refused:
        raise ToolkitError(
            f"adamw_8bit cannot be combined with {refused[0]}: the scales of its moments belong to blocks "
            "of whole parameters",
            where="train.optimizer",
            fix='use optimizer = "adamw"',
        )


def _check_adaptive(train: TrainTable, parallel: ParallelTable) -> None:
    if max(parallel.shard, parallel.tp, parallel.pp, parallel.cp) > 1:
        raise ToolkitError(
            "AdaScale needs the whole gradient of each micro-batch, but ranks that share a model have only parts of it",
            where="train.lr_scaling",
            fix='use "linear" or "square_root", or set shard, tp, pp and cp to 1',
        )
    if train.precision == "fp16":
        raise ToolkitError(
            "AdaScale needs the unscaled gradient of each micro-batch, but fp16 scales the loss",
            where="train.lr_scaling",
            fix='use precision = "bf16"',
        )
    if train.batch < train.lr_reference_batch:
        raise ToolkitError(
            f"AdaScale requires a batch of at least lr_reference_batch = {train.lr_reference_batch}, got {train.batch}",
            where="train.lr_reference_batch",
            fix=f"set lr_reference_batch to {train.batch} or less",
        )


def check_roll_back(train: TrainTable, checkpoint: CheckpointTable | None, *, has_one: bool) -> None:
    """Reject `guard = "roll_back"` if the run would have no checkpoint to return to.

    Args:
        checkpoint: the schedule of saves; None if the run cannot save.
        has_one: whether the run already has a checkpoint.

    Raises:
        ToolkitError: the run saves no checkpoint before its end.
    """
    if train.guard != "roll_back" or has_one:
        return
    if checkpoint is None:
        raise ToolkitError(
            '"roll_back" returns to a checkpoint, but without a run directory the job cannot save one',
            where="train.guard",
            fix='start the job with `toolkit run` or `toolkit submit`, or set train.guard = "skip"',
        )
    saved_by = [checkpoint.every_steps, checkpoint.best_every_steps if checkpoint.best else 0]
    if checkpoint.every_s == 0 and not any(0 < steps < train.steps for steps in saved_by):
        raise ToolkitError(
            f'"roll_back" returns to a checkpoint, but none is scheduled before the last step: checkpoint.every_steps is '
            f"{checkpoint.every_steps}, train.steps {train.steps}",
            where="train.guard",
            fix=f'set checkpoint.every_steps from 1 to {train.steps - 1}, or train.guard = "skip"',
        )
