"""A rank that runs out of memory: what filled it, and the smaller micro-batch of the next attempt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.config.train import ParallelTable, TrainTable, no_micro_batches
from toolkit.errors import first_line
from toolkit.train.adapters.layers import adapted_layers
from toolkit.train.memory.local_parts import bytes_on, local_of
from toolkit.train.memory.tier import FileTier, Tier
from toolkit.units import format_bytes

__all__ = ["halved_micro_batch", "memory_parts", "parts_named"]

_RESERVE_BYTES = 16 << 20  # of address space only, because nothing writes to it


def halved_micro_batch(train: TrainTable, parallel: ParallelTable, share: int, halvings: int) -> int:
    """Return the micro-batch size after a number of halvings: the largest one that divides the samples of a rank.

    Args:
        share: samples of a data-parallel rank per step, so that the global batch stays the same.
    """
    wanted = max(1, (train.micro_batch or share) >> halvings)
    sizes = (size for size in range(wanted, 0, -1) if share % size == 0)
    return next((size for size in sizes if not no_micro_batches(parallel, share // size)), 1)


def memory_parts(model: nn.Module, optimizer: torch.optim.Optimizer, tier: Tier | None = None) -> dict[str, int]:
    """Return the bytes that this rank uses on its device, by what uses them.

    Args:
        tier: contains what is offloaded, which uses no memory if the tier is a file.
    """
    parameters = list(model.parameters())
    device = local_of(parameters[0]).device
    gradients = [one.grad for one in parameters if one.grad is not None]
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if isinstance(value, Tensor)]
    if isinstance(tier, FileTier):
        state = [value for value in state if not tier.has_mapped(local_of(value))]
    kinds: dict[str, Sequence[Tensor]] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer state": state,
        "buffers": list(model.buffers()),
    }
    quantised = [layer.quantised.packed for _, layer in adapted_layers(model) if layer.quantised is not None]
    if quantised:
        kinds["quantised weights"] = [packed for packed in quantised if packed is not None]
    parts = {name: bytes_on(device, tensors) for name, tensors in kinds.items()}
    return parts | {"activations, libraries and the rest": max(0, _used_bytes(device) - sum(parts.values()))}


@contextmanager
def parts_named(parts: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Add what fills the memory to the error of a rank that runs out of it within this context."""
    # Freed for the error itself: without memory for a traceback, MPI's hooks can deadlock within malloc.
    reserve: list[Tensor] = [torch.empty(_RESERVE_BYTES, dtype=torch.uint8)]
    try:
        yield
    except RuntimeError as error:
        reserve.clear()
        if is_out_of_memory(error):
            named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts().items())
            error.args = (f"{first_line(error)} (memory of this rank: {named})",)
        raise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
