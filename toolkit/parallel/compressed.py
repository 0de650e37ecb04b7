"""Compressed gradients of models that are sharded, split or in a pipeline; replicated.py has those of whole copies.

Copies of the model average their gradients after the backward passes: each rank has the same part of the model as the
ranks of `replicate`. Without copies, FSDP2's reduce-scatter sends compressed parts of gradients, without error feedback,
which would need whole gradients on every rank.
"""

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.comm.communicator import Communicator
from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.exchange import reduce_scatter
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import COMMUNICATION
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, Passes
from toolkit.parallel.replicated import compression_of
from toolkit.world.facts import World

__all__ = ["averages_copies", "compress_scattered", "compressed_copies"]

_BUCKET_BYTES = 25 << 20


def averages_copies(mesh: Mesh, config: ResolvedJob) -> bool:
    """Return whether copies of shards, slices or stages average their gradients in compressed form, instead of FSDP2."""
    return config.gradient_compression.algorithm != "none" and not mesh.are_copies and mesh.sizes["replicate"] > 1


class CompressedCopies:
    """Runs passes that leave each copy its own gradients, then averages these over the copies."""

    def __init__(
        self, passes: Passes, parts: Sequence[dict[str, nn.Parameter]], compression: GradientCompression,
        communicator: Communicator, profile: Profile,
    ) -> None:  # fmt: skip
        """Average the gradients of `parts`, buckets of parameters by name, the same on all ranks of the communicator."""
        self._passes, self._parts, self._profile = passes, parts, profile
        self._communicator, self.compression = communicator, compression

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        self._passes.run(micro_batches, part_of, heard, precision)
        with self._profile.phase(COMMUNICATION):
            started = [
                self._communicator.start.reduce_compressed(self.compression, list(part), _gradients_of(part))
                for part in self._parts
            ]
            for one in started:
                one.wait()

    def prepare(self, once: Callable[[], None]) -> None:
        self._passes.prepare(once)
        self.compression.reset()


def compressed_copies(
    passes: Passes, model: nn.Module, world: World, mesh: Mesh, config: ResolvedJob, profile: Profile,
    twice: Collection[nn.Parameter] = (),
) -> CompressedCopies:  # fmt: skip
    """Average the gradients that `passes` leaves over the copies of the model. Collective.

    Args:
        twice: parameters that another stage has as well, whose results must be equal to the last bit.
    """
    compression = compression_of(model, world, config)
    communicator = Communicator(world, mesh.group("replicate"), timeout_s=float(config.restart.collective_timeout_s))
    compression.kept.peers = communicator.peers
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if world.rank == 0:
        sys.stderr.write(f"gradient reduction: {compression.describe(communicator.size)}, after the backward passes\n")
    return CompressedCopies(passes, [*_buckets(named, twice)], compression, communicator, profile)


def _buckets(named: dict[str, nn.Parameter], twice: Collection[nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Group parameters, so that numbers which other ranks have as well share a scale with the same numbers everywhere.

    A parameter that another stage has, too, is alone; whole ones are not beside the slices of a tensor-parallel rank.
    """
    shared = {id(one) for one in twice}
    buckets: dict[bool, dict[str, nn.Parameter]] = {True: {}, False: {}}
    for name, parameter in named.items():
        if id(parameter) in shared:
            yield {name: parameter}
            continue
        bucket = buckets[_is_sliced(parameter)]
        bucket[name] = parameter
        if sum(one.nbytes for one in bucket.values()) >= _BUCKET_BYTES:
            yield dict(bucket)
            bucket.clear()
    yield from (bucket for bucket in buckets.values() if bucket)


def _is_sliced(parameter: nn.Parameter) -> bool:
    """Return whether tensor-parallel ranks have different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tp" and not place.is_replicate() for name, place in zip(names, parameter.placements, strict=True)
    )


def _gradients_of(part: dict[str, nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of the gradients, which the exchange changes in place."""
    found = []
    for name, parameter in part.items():
        gradient = parameter.grad
        if gradient is None:
            raise ToolkitError(
                f"gradient compression requires a gradient of each parameter, but {name} has none",
                where="gradient_compression.algorithm",
                fix="call requires_grad_(False) on parameters that the model does not use",
            )
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found


def compress_scattered(model: nn.Module, world: World, config: ResolvedJob) -> None:
    """Compress the parts of gradients that FSDP2's reduce-scatter sends, in all FSDP modules of `model`."""
    table = config.gradient_compression
    scatter = CompressedScatter(table, config.train.seed)
    dense_bytes = 2 if config.parallel.reduce_type == "bf16" else 4
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    share = scatter.compressor.wire_bytes(1 << 20) / (dense_bytes << 20)
    if world.rank == 0:
        dense = f"{share:.1%} of the bytes of dense gradients"
        sys.stderr.write(f"gradient reduction: {table.algorithm} in the reduce-scatter: {dense}\n")


class CompressedScatter:
    """A reduce-scatter of compressed parts, for `FSDPModule.set_custom_reduce_scatter`; sums are fp32.

    torch's types of the arguments are private; it calls only these two methods.
    """

    def __init__(self, table: GradientCompressionTable, seed: int) -> None:
        self.compressor = BUILD[table.algorithm](table)
        self._least, self._seed = table.min_elements, seed
        self._is_random = table.algorithm in ("qsgd", "terngrad", "natural") or table.rounding == "stochastic"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum or average. Always complete on return."""
        if input_tensor.numel() < self._least:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        rows = input_tensor.view(group.size(), -1).float()
        part = reduce_scatter(rows, self.compressor, group, self._seed_of(rows) if self._is_random else 0)
        output_tensor.copy_(part / group.size() if op == dist.ReduceOp.AVG else part)

    def _seed_of(self, rows: Tensor) -> int:
        """Return a seed that follows from the gradients, so that a resumed run repeats it; other ranks need not know it."""
        words = f"{self._seed}/{int(rows.view(torch.int32).sum(dtype=torch.int64))}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6], "little")
