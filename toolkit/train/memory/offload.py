"""What a training keeps outside of the memory of its device, as `train.offload` and `train.offload_to` set it."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError
from toolkit.metrics.memory_limits import memories
from toolkit.parallel.outline import Outline
from toolkit.terminal.talk import say_beside
from toolkit.train.memory.local_parts import local_of
from toolkit.train.memory.offload_activations import offload_activations
from toolkit.train.memory.offload_gradients import OffloadedGradients
from toolkit.train.memory.offload_parameters import StreamedParameters
from toolkit.train.memory.streamed_optimizer import StreamedOptimizer
from toolkit.train.memory.tier import FileTier, HostTier, Tier
from toolkit.units import format_bytes
from toolkit.world.facts import World
from toolkit.world.record import record

__all__ = ["Offload"]

_STATES = {"adamw": 2, "adamw_8bit": 0.5, "muon": 1, "sgd": 1}  # bytes of state per byte of a parameter, at least


class Offload:
    """The tier of this rank, and what is in it.

    Args:
        outline: names the blocks of the model, whose parameters or activations may be in the tier.
        tier: used instead of a new one.

    Raises:
        ToolkitError: the tier cannot hold what the job offloads.
    """

    def __init__(
        self, train: TrainTable, model: nn.Module, outline: Outline, world: World, tier: Tier | None = None
    ) -> None:
        self._model, self._chosen = model, train.offloaded
        of_blocks = self._chosen & {"parameters", "activations"}
        self._blocks = blocks = list(outline.blocks_of(model)) if of_blocks else []
        needed = _needed_bytes(train, model, blocks)
        self.tier: Tier
        if tier is not None:
            self.tier = tier
        elif train.offload_to:
            folder = Path(os.path.expandvars(train.offload_to))
            file = FileTier(folder)
            _check_free_space(needed, shutil.disk_usage(folder).free, world, f"on the disk of {folder}")
            if not file.is_direct and world.local_rank == 0:
                say_beside(
                    f"{folder} does not support O_DIRECT: the page cache of offloaded tensors uses memory of the job"
                )
            self.tier = file
        else:
            name, free = min(((name, free) for name, free, _ in memories(Path("/"))), key=lambda one: one[1])
            _check_free_space(needed, free, world, f"of memory in {name}")
            self.tier = HostTier(world.device)
        self.gradients = OffloadedGradients(model.parameters(), self.tier) if "gradients" in self._chosen else None
        self._parameters: StreamedParameters | None = None
        if "activations" in self._chosen:
            stored_as = torch.bfloat16 if train.offload_activations_as == "bf16" else None
            offload_activations(blocks, self.tier, stored_as)
        self._seen = (0, 0, 0.0)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer for what is in the tier."""
        if not self._chosen & {"optimizer", "gradients", "parameters"}:
            return optimizer
        return StreamedOptimizer(optimizer, self.tier, self.gradients, with_state="optimizer" in self._chosen)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters into the tier; the model has its values."""
        if "parameters" in self._chosen:
            assert isinstance(optimizer, StreamedOptimizer)
            optimizer.parameters = self._parameters = StreamedParameters(self._model, self._blocks, self.tier)

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the values of a parameter, which may be out of memory."""
        return self._parameters.kept(tensor) if self._parameters is not None else tensor

    def record(self) -> None:
        """Record the traffic of the step."""
        traffic, seen = self.tier.traffic, self._seen
        self._seen = (traffic.read_bytes, traffic.written_bytes, traffic.waited_s)
        names = ("offload_read_bytes", "offload_written_bytes", "offload_wait_s")
        for name, now, before in zip(names, self._seen, seen, strict=True):
            record(name, float(now - before))


def _needed_bytes(train: TrainTable, model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Return the bytes of what this rank offloads; activations are not known yet."""
    trained = sum(local_of(one).nbytes for one in model.parameters() if one.requires_grad)
    sizes = {
        "optimizer": int(_STATES[train.optimizer] * trained),
        "gradients": trained,
        "parameters": sum(local_of(one).nbytes for block in blocks for one in block.parameters()),
    }
    return {name: size for name, size in sizes.items() if name in train.offloaded}


def _check_free_space(needed: Mapping[str, int], free: int, world: World, place: str) -> None:
    total = sum(needed.values()) * world.local_size
    if total > free:
        parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in needed.items())
        ranks = f", on each of {world.local_size} ranks of {world.host}" if world.local_size > 1 else ""
        raise ToolkitError(
            f"expected {format_bytes(total)} {place} for offloaded tensors ({parts}{ranks}), got {format_bytes(free)}",
            where="train.offload_to" if "disk" in place else "train.offload",
            fix="use more ranks with parallel.shard, a smaller model, or a folder on a larger disk as train.offload_to",
        )
