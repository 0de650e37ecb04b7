"""A whole model on every rank, with gradients summed in buckets during the backward pass: torch's DDP.

S. Li et al., "PyTorch Distributed", VLDB 2020, arXiv:2006.15704.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.gradient import find_reduction
from toolkit.config.resolved import ResolvedJob
from toolkit.config.train import DDP_BUCKET_MB
from toolkit.errors import ToolkitError
from toolkit.metrics.phases import Profile
from toolkit.parallel.bucket_plan import measure_link, measure_readiness, plan_buckets
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, PassesInTurn
from toolkit.topology.facts import Topology
from toolkit.world.facts import World

TRIED_MB = (1.0, 5.0, DDP_BUCKET_MB, 100.0)
_REPEATS = 3  # timed passes per bucket size, after a first pass in which DDP builds its buckets


class ReplicatedPasses:
    """Runs passes through a model that is replicated by DDP; gradients are reduced with the last micro-batch."""

    def __init__(
        self, wrap: Callable[[float | list[float]], DistributedDataParallel], bucket_mb: float | Literal["measured", "planned"],
        ranks: int, profile: Profile,
    ) -> None:  # fmt: skip
        """Wrap the model. Collective.

        Args:
            wrap: wraps the model in DDP with the given bucket size in MiB, or with one for each bucket.
            bucket_mb: the bucket size, or how to choose it in `prepare`.
            profile: records the phases of the passes.
        """
        self.compression: GradientCompression | None = None
        self._wrap, self._ranks, self._profile = wrap, ranks, profile
        self._chosen_by = bucket_mb if isinstance(bucket_mb, str) else ""
        self._passes = self._with_buckets(DDP_BUCKET_MB if isinstance(bucket_mb, str) else bucket_mb)

    @property
    def module(self) -> nn.Module:
        """The model, wrapped in DDP."""
        return self._passes.module

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        self._passes.run(micro_batches, part_of, heard, precision)

    def prepare(self, once: Callable[[], None]) -> None:
        """Choose the bucket sizes if they are not given, then run another pass, in which DDP builds its final buckets."""
        if self._chosen_by == "planned":
            self._plan(once)
        if self._chosen_by == "measured":
            seconds = {size_mb: self._try(size_mb, once) for size_mb in self._sizes_mb()}
            best = min(seconds, key=lambda size_mb: seconds[size_mb])
            if dist.get_rank() == 0:
                found = ", ".join(f"{size_mb:g} MiB {taken * 1e3:.1f} ms" for size_mb, taken in seconds.items())
                sys.stderr.write(f"gradient buckets: {best:g} MiB (a pass took: {found})\n")
            self._passes = self._with_buckets(best)
        once()
        if self.compression is not None:
            self.compression.reset()

    def _plan(self, once: Callable[[], None]) -> None:
        """Plan the sizes of buckets, and keep them if a pass with them is not slower than with the default size."""
        default_s = self._try(DDP_BUCKET_MB, once)
        parallel = self._passes.module
        assert isinstance(parallel, DistributedDataParallel)
        group, device = parallel.process_group, next(parallel.parameters()).device
        ready_s, sizes = measure_readiness(parallel, group, lambda: self._without_reduction(once))
        plan = plan_buckets(ready_s, sizes, measure_link(group, sum(sizes), device))
        del parallel  # with its buckets
        planned_s = self._try(plan.sizes_mb, once)
        if dist.get_rank() == 0:
            found = ", ".join(f"{size_mb:.3g}" for size_mb in plan.sizes_mb)
            kept = "kept" if planned_s <= default_s else f"{DDP_BUCKET_MB:g} MiB kept"
            predicted = "" if self.compression is not None else f" (predicted {plan.ends_s * 1e3:.1f})"
            sys.stderr.write(
                f"gradient buckets: {found} MiB planned; a pass takes {planned_s * 1e3:.1f} ms{predicted}, {default_s * 1e3:.1f} ms with {DDP_BUCKET_MB:g} MiB: {kept}\n"
            )
        if planned_s > default_s:
            self._passes = self._with_buckets(DDP_BUCKET_MB)

    def _without_reduction(self, once: Callable[[], None]) -> None:
        assert isinstance(self._passes.module, DistributedDataParallel)
        with self._passes.module.no_sync():
            once()

    def _with_buckets(self, size_mb: float | list[float]) -> PassesInTurn:
        parallel = self._wrap(size_mb)
        # DDP averages gradients over ranks.
        return PassesInTurn(parallel, float(self._ranks), parallel.no_sync, self._profile)

    def _sizes_mb(self) -> list[float]:
        """Return the bucket sizes to try, of which at most one is large enough for the whole model."""
        assert isinstance(self._passes.module, DistributedDataParallel)
        parameters = self._passes.module.parameters()
        model_mb = sum(one.numel() * one.element_size() for one in parameters if one.requires_grad) / 2**20
        return [size_mb for number, size_mb in enumerate(TRIED_MB) if not number or TRIED_MB[number - 1] < model_mb]

    def _try(self, size_mb: float | list[float], once: Callable[[], None]) -> float:
        """Return the median seconds of a pass on the slowest rank; the same on all ranks."""
        self._passes = self._with_buckets(size_mb)
        if self.compression is not None:
            self.compression.reset()  # else trials of "auto" would fall into some sizes
        once()
        taken = []
        for _ in range(_REPEATS):
            dist.barrier()
            start = time.perf_counter()
            once()
            taken.append(time.perf_counter() - start)
        # Use the device of the parameters, because the backend supports it.
        found = torch.tensor(statistics.median(taken), device=next(self._passes.module.parameters()).device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)


def replicate(
    model: nn.Module, mesh: Mesh, world: World, config: ResolvedJob, topology: Topology, profile: Profile
) -> ReplicatedPasses:
    """Replicate `model` on all ranks of the mesh dimensions `replicate` and `cp`. Collective."""
    settings = config.parallel
    group = mesh.group("replicate", "cp") or dist.group.WORLD
    assert group is not None, "initialize the default process group before distributing a model"
    compression = compression_of(model, world, config) if config.gradient_compression.algorithm != "none" else None
    reduction = find_reduction(group, world, settings.reduction, topology, compression=compression)

    def wrap(bucket_mb: float | list[float]) -> DistributedDataParallel:
        sizes: dict[str, Any] = {"bucket_cap_mb_list" if isinstance(bucket_mb, list) else "bucket_cap_mb": bucket_mb}
        parallel = DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view=True,
            find_unused_parameters=settings.unused_parameters,
            **sizes,
        )
        reduction.register_on(parallel, overlap=settings.overlap)
        return parallel

    if settings.bucket_mb == "planned" and "bucket_cap_mb_list" not in signature(DistributedDataParallel).parameters:
        raise ToolkitError(
            f"planned buckets require torch 2.13 or newer, got {torch.__version__}",
            where="parallel.bucket_mb",
            fix='set bucket_mb = "measured", or a size',
        )
    passes = ReplicatedPasses(wrap, settings.bucket_mb, mesh.gradient_size, profile)
    passes.compression = compression
    return passes


def compression_of_one_rank(model: nn.Module, config: ResolvedJob) -> GradientCompression:
    """Return the compression of a single rank, which keeps the residuals of a checkpoint of more ranks; print that it sends nothing."""
    sys.stderr.write("gradient reduction: none, because a single rank sends no gradients\n")
    return GradientCompression(config.gradient_compression, _trained(model), config.train.seed, is_alone=True)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def compression_of(model: nn.Module, world: World, config: ResolvedJob) -> GradientCompression:
    """Return the compression of the gradients of `model`; rank 0 prints what is known to harm."""
    compression = GradientCompression(config.gradient_compression, _trained(model), config.train.seed)
    for warning in compression.warnings(config.train.optimizer, config.train.steps):
        if world.rank == 0:
            sys.stderr.write(f"gradient compression: {warning} (docs/compression.md)\n")
    return compression
